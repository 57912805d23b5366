#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "pipeline_rig.h"
#include "staging/twin_device.h"
#include "util/align.h"

namespace weightlift {
namespace {

const std::vector<int32_t> kPlaces = {kHost, 0, 1};

// A Pipeline's options, and the twins of two GPUs that it finds.
struct DeviceRig {
  Rig rig;
  std::array<TwinOptions, 2> options;
  std::array<std::shared_ptr<TwinDevice>, 2> twins;
  std::array<std::vector<DeviceStream>, 2> streams;  // the caller's
  std::array<int64_t, 2> allocated{};

  explicit DeviceRig(Rig of, int64_t scratch_bytes = 8 * kChunk) : rig(std::move(of)) {
    rig.options.devices.scratch_bytes = scratch_bytes;
    rig.options.devices.make_device = [this](int32_t device) { return twin(device); };
    for (size_t i : {0, 1}) options[i].seed = i + 1;
  }

  std::shared_ptr<TwinDevice> twin(int32_t device) {
    auto& twin = twins.at(static_cast<size_t>(device));
    if (!twin) {
      TwinOptions with_scratch = options.at(static_cast<size_t>(device));
      const auto begin = reinterpret_cast<int64_t>(arenas_.at(static_cast<size_t>(device)).data());
      if (!with_scratch.memory.empty()) with_scratch.memory.push_back({begin, begin + kArenaBytes});
      twin = std::make_shared<TwinDevice>(with_scratch);
    }
    return twin;
  }

  DeviceCaller caller() {
    return {[this](int32_t device) { return streams.at(static_cast<size_t>(device)); },
            [this](int32_t device, int64_t bytes) {
              std::byte* memory =
                  arenas_.at(static_cast<size_t>(device)).data() + allocated.at(static_cast<size_t>(device));
              allocated.at(static_cast<size_t>(device)) += align_up(bytes, 256);
              REQUIRE(allocated.at(static_cast<size_t>(device)) <= kArenaBytes);
              return memory;
            }};
  }

 private:
  static constexpr int64_t kArenaBytes = 64 * kMiB;
  std::array<Memory, 2> arenas_{Memory(kArenaBytes), Memory(kArenaBytes)};
};

Transfer to_device(Transfer transfer, int32_t device = 0) {
  transfer.device = device;
  return transfer;
}

bool holds(const Memory& memory, const std::byte* bytes, int64_t count) {
  return std::memcmp(memory.data(), bytes, static_cast<size_t>(count)) == 0;
}

}  // namespace

TEST_CASE("everything lands on the devices it is for, however late and in whatever order they work") {
  const TestFile one(3 * kMiB + 17, 1);
  const TestFile two(200 * kKiB + 3, 2);
  FaultPlan faults;
  faults.short_chance = 0.3, faults.out_of_order = true, faults.max_delay = 3;
  for (const Strategy strategy : {Strategy::kBuffered, Strategy::kAuto}) {
    // Little scratch: large granules take more of it, and few streams have a slice.
    for (const int64_t scratch_bytes : {kChunk / 2, 3 * kChunk, 64 * kChunk}) {
      for (uint64_t seed = 0; seed < 6; ++seed) {
        CAPTURE(static_cast<int>(strategy));
        CAPTURE(scratch_bytes);
        CAPTURE(seed);
        faults.seed = seed;
        Load load(seed, {&one, &two}, 40, kPlaces);
        DeviceRig rig(make_rig(strategy, faults), scratch_bytes);
        for (size_t device : {0, 1}) {
          rig.options[device].seed = seed;
          rig.options[device].memory = {load.memory(static_cast<int32_t>(device))};
        }
        rig.rig.options.num_workers = 3;
        Pipeline pipeline(rig.rig.options);
        load.add_files(pipeline);
        CHECK(load.run(pipeline, rig.caller()));
        const PipelineStats stats = pipeline.stats();
        CHECK(stats.device_scratch_bytes <= rig.allocated[0] + rig.allocated[1]);
        CHECK(stats.fallbacks.empty());
      }
    }
  }
}

TEST_CASE("the copies of each segment wait for what the caller's streams were given before") {
  const TestFile file(kMiB);
  Memory memory(kMiB);
  DeviceRig rig(make_rig(Strategy::kBuffered));
  rig.streams[0] = {rig.twin(0)->make_stream(), rig.twin(0)->make_stream()};
  Pipeline pipeline(rig.rig.options);
  pipeline.add_file(file.path(), file.identity());
  for (const int of_stream : {0, 1, 0, 1}) {
    for (const bool is_strided : {false, true}) {
      CAPTURE(of_stream);
      CAPTURE(is_strided);
      std::atomic<bool> may_fill{false};
      rig.twin(0)->enqueue(rig.streams[0][static_cast<size_t>(of_stream)], [&] {
        while (!may_fill) std::this_thread::sleep_for(1ms);
        std::memset(memory.data(), 0xEE, kMiB);
      });
      const Transfer transfer = to_device(is_strided ? staged(0, 0, 0, 100'000, memory.data())
                                                     : contiguous(0, 0, 0, kMiB / 2, memory.data()));
      const int64_t segment = pipeline.submit({transfer}, Order::kAppend, rig.caller());
      CHECK(!pipeline.wait(segment, 100ms));
      may_fill = true;
      CHECK(pipeline.wait(segment, kLong));
      CHECK(!pipeline.fault());
      std::vector<std::byte> expected(kMiB, std::byte{0xEE});
      copy_naively(transfer, file.bytes(), expected.data());
      CHECK(holds(memory, expected.data(), kMiB));
    }
  }
}

TEST_CASE("a staging buffer is not used again before the device has copied out of it") {
  const TestFile file(kMiB);
  Memory memory(kMiB);
  DeviceRig rig(make_rig(Strategy::kBuffered));
  rig.rig.options.staging_bytes = 2 * kChunk;
  rig.twin(0)->pause();
  Pipeline pipeline(rig.rig.options);
  pipeline.add_file(file.path(), file.identity());
  const int64_t segment =
      pipeline.submit({to_device(contiguous(0, 0, 0, kMiB, memory.data()))}, Order::kAppend, rig.caller());
  rig.rig.control->settle();
  CHECK(rig.rig.control->submitted == 2);
  CHECK(!pipeline.wait(segment, 0ms));
  CHECK(pipeline.bytes_landed() == 0);
  rig.twin(0)->resume();
  CHECK(pipeline.wait(segment, kLong));
  CHECK(holds(memory, file.bytes(), kMiB));
}

TEST_CASE("a segment lands when the device has done its last work, and not before") {
  const TestFile file(kMiB);
  DeviceRig rig(make_rig(Strategy::kBuffered));
  Pipeline pipeline(rig.rig.options);
  pipeline.add_file(file.path(), file.identity());
  for (int64_t id = 0; id < 8; ++id) {
    Memory memory(kMiB);
    Memory expected(kMiB);
    const int64_t count = 1000 + id;
    Transfer transfer =
        id % 2 ? staged(id, 0, 0, count, memory.data()) : contiguous(id, 0, 0, 100 * count, memory.data());
    copy_naively(transfer, file.bytes(), expected.data());
    rig.twin(0)->pause();
    const int64_t segment = pipeline.submit({to_device(std::move(transfer))}, Order::kUrgent, rig.caller());
    CHECK(!pipeline.wait(segment, 5ms));
    CHECK(pipeline.take_landed().empty());
    rig.twin(0)->resume();
    CHECK(pipeline.wait(segment, kLong));
    CHECK(holds(memory, expected.data(), kMiB));
    CHECK(pipeline.take_landed().size() == 1);
  }
}

TEST_CASE("scratch is not used again before the kernels have taken from it") {
  // One slice for all, and streams that would be ready to use it at the same time.
  const TestFile file(4 * kMiB);
  for (uint64_t seed = 0; seed < 4; ++seed) {
    CAPTURE(seed);
    Memory memory(2 * kMiB);
    Memory expected(2 * kMiB);
    const Transfer transfer = to_device(staged(0, 0, 0, kMiB / 2, memory.data()));
    copy_naively(transfer, file.bytes(), expected.data());
    DeviceRig rig(make_rig(Strategy::kBuffered), kChunk + 4096);
    rig.options[0].seed = seed;
    rig.options[0].num_streams = 4;
    rig.rig.options.num_workers = 4;
    rig.rig.options.staging_bytes = 32 * kChunk;
    Pipeline pipeline(rig.rig.options);
    pipeline.add_file(file.path(), file.identity());
    CHECK(pipeline.wait(pipeline.submit({transfer}, Order::kAppend, rig.caller()), kLong));
    CHECK(holds(memory, expected.data(), 2 * kMiB));
    CHECK(pipeline.stats().device_scratch_bytes == kChunk + 4096);
  }
}

TEST_CASE("whatever fails on a device is told with the transfer, at whichever call or work it is") {
  const TestFile file(kMiB);
  const int64_t num_parts = 6;
  for (const bool is_refused : {false, true}) {
    for (int64_t number = 0;; ++number) {
      CAPTURE(is_refused);
      CAPTURE(number);
      Memory memory(kMiB);
      DeviceRig rig(make_rig(Strategy::kBuffered));
      (is_refused ? rig.options[0].refuse_call : rig.options[0].fail_work) = number;
      std::vector<Transfer> transfers;
      for (int64_t id = 0; id < num_parts; ++id) {
        const int64_t at = id * 128 * kKiB;
        transfers.push_back(to_device(id % 2 ? staged(100 + id, 0, at, 10'000, memory.data() + at)
                                             : contiguous(100 + id, 0, at, 100 * kKiB, memory.data() + at)));
      }
      Pipeline pipeline(rig.rig.options);
      pipeline.add_file(file.path(), file.identity());
      const int64_t segment = pipeline.submit(transfers, Order::kAppend, rig.caller());
      CHECK(pipeline.wait(segment, kLong));
      const Fault fault = pipeline.fault();
      if (!fault) {
        CHECK(number > 2 * num_parts);  // it was none of them
        CHECK(pipeline.take_landed().size() == 1);
        break;
      }
      CHECK(fault.kind == FaultKind::kDevice);
      CHECK(fault.detail == (is_refused ? "GPU 0: refused by the twin" : "GPU 0: failed in the twin"));
      CHECK(fault.file == 0);
      CHECK(100 <= fault.transfer_id);
      CHECK(fault.transfer_id < 100 + num_parts);
      CHECK(pipeline.take_landed().empty());
      CHECK(pipeline.stop(kLong));
    }
  }
}

TEST_CASE("of a chunk that goes to two devices, a fault of either is told when both are done") {
  const TestFile file(kChunk);
  for (const size_t failing : {0, 1}) {
    Memory memory(2 * kChunk);
    DeviceRig rig(make_rig(Strategy::kBuffered));
    rig.options[failing].fail_work = 0;
    rig.twin(static_cast<int32_t>(1 - failing))->pause();
    Pipeline pipeline(rig.rig.options);
    pipeline.add_file(file.path(), file.identity());
    const int64_t segment = pipeline.submit({to_device(contiguous(0, 0, 0, kChunk, memory.data()), 0),
                                             to_device(contiguous(1, 0, 0, kChunk, memory.data() + kChunk), 1)},
                                            Order::kAppend, rig.caller());
    CHECK(!pipeline.wait(segment, 20ms));
    rig.twin(static_cast<int32_t>(1 - failing))->resume();
    CHECK(pipeline.wait(segment, kLong));
    CHECK(pipeline.fault().detail == "GPU " + std::to_string(failing) + ": failed in the twin");
    CHECK(pipeline.fault().transfer_id == static_cast<int64_t>(failing));
  }
}

TEST_CASE("a Pipeline that stops waits for what its devices have in flight") {
  const TestFile file(kMiB);
  for (const bool is_destroyed : {false, true}) {
    Memory memory(kMiB);
    DeviceRig rig(make_rig(Strategy::kBuffered));
    rig.twin(0)->pause();
    auto pipeline = std::make_unique<Pipeline>(rig.rig.options);
    pipeline->add_file(file.path(), file.identity());
    pipeline->submit({to_device(contiguous(0, 0, 0, kMiB, memory.data()))}, Order::kAppend, rig.caller());
    while (rig.twin(0)->num_copies() < 2) std::this_thread::sleep_for(1ms);
    if (!is_destroyed) {
      CHECK(!pipeline->stop(20ms));
      CHECK(!pipeline->destinations_in_flight().has_value());
      rig.twin(0)->resume();
      CHECK(pipeline->stop(kLong));
      CHECK(pipeline->destinations_in_flight().value().empty());
      CHECK(pipeline->fault().kind == FaultKind::kCancelled);
      CHECK(rig.twin(0)->num_pinned() > 0);
      pipeline.reset();
    } else {
      std::thread ends([&] { pipeline.reset(); });
      std::this_thread::sleep_for(20ms);
      CHECK(rig.twin(0)->num_pinned() > 0);
      rig.twin(0)->resume();
      ends.join();
    }
    CHECK(rig.twin(0)->num_pinned() == 0);
  }
}

TEST_CASE("a Pipeline with devices may end at any moment") {
  const TestFile one(3 * kMiB + 17, 1);
  const TestFile two(200 * kKiB + 3, 2);
  for (uint64_t seed = 0; seed < 20; ++seed) {
    CAPTURE(seed);
    Load load(seed, {&one, &two}, 40, kPlaces);
    DeviceRig rig(make_rig(Strategy::kBuffered));
    for (size_t device : {0, 1}) rig.options[device].seed = seed;
    rig.rig.control->permits = static_cast<int64_t>(3 * seed);
    {
      Pipeline pipeline(rig.rig.options);
      load.add_files(pipeline);
      pipeline.submit(load.transfers(), Order::kAppend, rig.caller());
      std::this_thread::sleep_for(std::chrono::milliseconds(seed % 5));
      rig.rig.control->permits = INT64_MAX;
    }
    for (const auto& twin : rig.twins) CHECK((!twin || twin->num_pinned() == 0));
  }
}

TEST_CASE("large plain copies go straight to their place, small ones share a copy and a launch") {
  const TestFile file(kMiB);
  Memory memory(2 * kMiB);
  DeviceRig rig(make_rig(Strategy::kBuffered));
  Pipeline pipeline(rig.rig.options);
  pipeline.add_file(file.path(), file.identity());
  const auto run = [&](std::vector<Transfer> transfers) {
    return pipeline.wait(pipeline.submit(std::move(transfers), Order::kAppend, rig.caller()), kLong) &&
           !pipeline.fault();
  };
  CHECK(run({to_device(contiguous(0, 0, 0, kMiB, memory.data()))}));
  CHECK(rig.twin(0)->num_copies() == kMiB / kChunk);
  CHECK(rig.twin(0)->num_launches() == 0);
  CHECK(rig.allocated[0] == 0);
  CHECK(holds(memory, file.bytes(), kMiB));

  std::vector<Transfer> small;
  for (int64_t i = 0; i < 1000; ++i)
    small.push_back(to_device(contiguous(i, 0, 64 * i, 64, memory.data() + kMiB + 65 * i)));
  CHECK(run(small));
  CHECK(rig.twin(0)->num_copies() == kMiB / kChunk + 1);
  CHECK(rig.twin(0)->num_launches() == 1);
  for (int64_t i = 0; i < 1000; ++i) CHECK(std::memcmp(memory.data() + kMiB + 65 * i, file.bytes() + 64 * i, 64) == 0);

  CHECK(run({to_device(contiguous(0, 0, 5, 100, memory.data()))}));  // one alone needs no kernel
  CHECK(rig.twin(0)->num_launches() == 1);
  CHECK(pipeline.stats().device_bytes == kMiB + 64'000 + 100);
  CHECK(pipeline.stats().in_place_bytes == 0);
}

TEST_CASE("a granule larger than a slice of scratch gets a larger one, and one larger than all staging too") {
  const TestFile file(4 * kMiB);
  Memory memory(8 * kMiB);
  DeviceRig rig(make_rig(Strategy::kBuffered), 8 * kChunk);
  rig.options[0].memory = {
      {reinterpret_cast<int64_t>(memory.data()), reinterpret_cast<int64_t>(memory.data()) + 8 * kMiB}};
  Pipeline pipeline(rig.rig.options);
  pipeline.add_file(file.path(), file.identity());
  int64_t before = 0;
  for (const int64_t rows : {int64_t{16}, 3 * kChunk / 1024, 12 * kChunk / 1024, int64_t{4096}}) {
    CAPTURE(rows);
    Memory fresh(4 * kMiB);
    Memory expected(4 * kMiB);
    auto op = std::make_shared<GranuleOp>(OpSource{4096, 1000, rows}, memory.data(), 1000);
    std::memset(memory.data(), 0, 4 * kMiB);
    const Transfer transfer = to_device(make_op_transfer(0, 0, 0, 1000, op));
    copy_naively(transfer, file.bytes(), expected.data());
    CHECK(pipeline.wait(pipeline.submit({transfer}, Order::kAppend, rig.caller()), kLong));
    CHECK(!pipeline.fault());
    CHECK(holds(memory, expected.data(), 4 * kMiB));
    CHECK(rig.allocated[0] > before);
    before = rig.allocated[0];
  }
}

TEST_CASE("memory that can't be pinned is copied from all the same, and that is told once") {
  const TestFile file(kMiB);
  Memory memory(kMiB);
  DeviceRig rig(make_rig(Strategy::kBuffered));
  rig.options[0].refuse_pin = true;
  Pipeline pipeline(rig.rig.options);
  pipeline.add_file(file.path(), file.identity());
  CHECK(pipeline.wait(
      pipeline.submit({to_device(contiguous(0, 0, 0, kMiB, memory.data()))}, Order::kAppend, rig.caller()), kLong));
  CHECK(holds(memory, file.bytes(), kMiB));
  REQUIRE(pipeline.stats().fallbacks.size() == 1);
  CHECK(pipeline.stats().fallbacks[0].find("not pinned") != std::string::npos);
}

TEST_CASE("what can't be had of a device is thrown before anything is read") {
  const TestFile file(kMiB);
  Memory memory(kMiB);
  const auto throws = [](auto...) -> std::byte* { throw std::runtime_error("out of memory"); };
  {
    DeviceRig rig(make_rig(Strategy::kBuffered));
    rig.rig.options.devices.make_device = [](int32_t) -> std::shared_ptr<Device> {
      throw std::runtime_error("no GPU");
    };
    Pipeline pipeline(rig.rig.options);
    pipeline.add_file(file.path(), file.identity());
    CHECK_THROWS_WITH(
        pipeline.submit({to_device(contiguous(0, 0, 0, kMiB, memory.data()))}, Order::kAppend, rig.caller()), "no GPU");
    // Nor is one asked for without need.
    CHECK(pipeline.wait(pipeline.submit({contiguous(0, 0, 0, kMiB, memory.data())}, Order::kAppend), kLong));
    CHECK(!pipeline.fault());
  }
  DeviceRig rig(make_rig(Strategy::kBuffered));
  Pipeline pipeline(rig.rig.options);
  pipeline.add_file(file.path(), file.identity());
  DeviceCaller caller = rig.caller();
  caller.allocate = throws;
  CHECK_THROWS_WITH(pipeline.submit({to_device(staged(0, 0, 0, 1000, memory.data()))}, Order::kAppend, caller),
                    "out of memory");
  CHECK(rig.rig.control->submitted == 0);
  CHECK(pipeline.stop(kLong));
}

TEST_CASE("nothing is read in place into a device, nor is its memory prepared") {
  Memory memory(16 * kMiB);
  PlanOptions options;
  options.chunk_bytes = kMiB;
  options.mode_of = [](int32_t, ByteRange) { return ReadMode{true, 512, 512, false}; };
  int num_asked = 0;
  options.can_prepare = [&](ByteRange) { return ++num_asked > 0; };
  Transfer transfer = contiguous(0, 0, 0, 16 * kMiB, memory.data());
  CHECK(!plan_reads({transfer}, options).preparations.empty());
  num_asked = 0;
  const Plan plan = plan_reads({to_device(transfer)}, options);
  CHECK(num_asked == 0);
  CHECK(plan.preparations.empty());
  CHECK(plan.advised.empty());
  for (const Read& read : plan.reads) CHECK(read.destination == nullptr);
}

}  // namespace weightlift
