#include "plan/planner.h"

#include <algorithm>
#include <map>
#include <optional>
#include <queue>
#include <utility>

#include "util/align.h"

namespace weightlift {
namespace {

// Small reads of one chunk start at multiples of this within the staging buffer (any direct I/O alignment divides it).
constexpr int64_t kStagingAlignment = 4096;
// Most reads in one chunk: more would leave workers idle until the last of them has landed.
constexpr int32_t kMaxReadsPerChunk = 256;

// A stretch of a file that one transfer needs (gaps up to the merge bound included): its elements [first, last).
struct Span {
  int64_t begin;
  int64_t end;
  int32_t transfer;
  int64_t first;
  int64_t last;
};

struct LaterSpan {
  bool operator()(const Span& a, const Span& b) const {
    return std::pair(a.begin, a.transfer) > std::pair(b.begin, b.transfer);
  }
};

// Bytes of the file that elements [first, last) occupy, gaps and repeats not counted.
int64_t occupied_bytes(const Transfer& transfer, int64_t first, int64_t last) {
  int64_t repeats = 1;
  for (const Dim& dim : transfer.dims) {
    if (dim.src_stride == 0) repeats *= dim.size;
  }
  return (last - first) / repeats * element_bytes(transfer.src_type);
}

// Offset in the file behind an element.
int64_t element_end(const Transfer& transfer, int64_t index) {
  return transfer.src_offset + source_byte(transfer, index) + element_bytes(transfer.src_type);
}

// Whether a granule's rows lie so far apart that each is read on its own.
bool has_rows_apart(const Transfer& transfer, int64_t merge_gap_bytes) {
  if (!transfer.op || transfer.op->source().granule_rows == 1) return false;
  const int64_t row_bytes = transfer.op->source().row_bytes;
  return source_byte(transfer, row_bytes) - row_bytes > merge_gap_bytes;
}

// Cuts a transfer's source where its gaps are larger than the bound, but not inside of a granule.
void add_spans(const Transfer& transfer, int32_t position, int64_t merge_gap_bytes, std::vector<Span>& spans) {
  if (has_rows_apart(transfer, merge_gap_bytes)) {
    const int64_t elements = transfer.num_elements();
    for (int64_t first = 0; first < elements; first += transfer.granule()) {
      const int64_t last = std::min(first + transfer.granule(), elements);
      spans.push_back(
          {transfer.src_offset + source_byte(transfer, first), element_end(transfer, last - 1), position, first, last});
    }
    return;
  }
  int64_t extent = element_bytes(transfer.src_type);  // of what lies inside dimension d, in the file
  int64_t elements = 1;
  size_t outer = transfer.dims.size();  // dims[0, outer) are walked one by one, the rest is one span
  while (outer > 0) {
    const Dim& dim = transfer.dims[outer - 1];
    if (dim.src_stride - extent > merge_gap_bytes) break;
    extent += dim.src_stride * (dim.size - 1);
    elements *= dim.size;
    --outer;
  }
  std::vector<int64_t> index(outer, 0);
  int64_t begin = transfer.src_offset;
  int64_t first = 0;
  for (;;) {
    spans.push_back({begin, begin + extent, position, first, first + elements});
    first += elements;
    size_t d = outer;
    while (d > 0) {
      const Dim& dim = transfer.dims[d - 1];
      begin += dim.src_stride;
      if (++index[d - 1] < dim.size) break;
      begin -= dim.src_stride * dim.size;
      index[d - 1] = 0;
      --d;
    }
    if (d == 0) return;
  }
}

// Memory that destinations fill and that is worth preparing.
struct Destination {
  ByteRange memory;
  std::vector<int32_t> preparations;  // of each step, its position in Plan::preparations, or one of:
  static constexpr int32_t kNotListed = -1;
  static constexpr int32_t kAdvised = -2;
};

class Destinations {
 public:
  Destinations(const std::vector<Transfer>& transfers, const std::function<bool(ByteRange)>& can_prepare) {
    if (!can_prepare) return;
    std::vector<ByteRange> bounds;
    bounds.reserve(transfers.size());
    for (const Transfer& transfer : transfers) {
      if (transfer.device != kHost) continue;
      const ByteRange extent = destination_bounds(transfer);
      // A few columns of a wide matrix are no reason to give memory to all of it.
      if (extent.size() > kMaxSparseness * destination_bytes(transfer)) continue;
      // In whole pages, so that destinations that an allocator laid side by side are one, and get huge pages as one.
      bounds.push_back({align_down(extent.begin, kPageBytes), align_up(extent.end, kPageBytes)});
    }
    for (const ByteRange& memory : unite(std::move(bounds))) {
      if (memory.size() < kMinPrepareBytes || !can_prepare(memory)) continue;
      const auto num_steps = static_cast<size_t>((memory.end - 1) / kPrepareStep - memory.begin / kPrepareStep + 1);
      destinations_.push_back({memory, std::vector<int32_t>(num_steps, Destination::kNotListed)});
    }
  }

  // The one that holds all of a transfer's destination, or null.
  Destination* find(const Transfer& transfer) {
    if (transfer.device != kHost) return nullptr;
    const ByteRange wanted = destination_bounds(transfer);
    auto it = std::upper_bound(destinations_.begin(), destinations_.end(), wanted.begin,
                               [](int64_t at, const Destination& other) { return at < other.memory.begin; });
    if (it == destinations_.begin() || (--it)->memory.end < wanted.end) return nullptr;
    return &*it;
  }

 private:
  static constexpr int64_t kMaxSparseness = 4;
  static constexpr int64_t kPageBytes = 4096;

  std::vector<Destination> destinations_;  // ascending, disjoint
};

class FilePlanner {
 public:
  FilePlanner(Plan& plan, const PlanOptions& options, Destinations& destinations, int32_t file, std::vector<Span> spans)
      : plan_(plan), options_(options), destinations_(destinations), file_(file), spans_(std::move(spans)) {
    std::sort(spans_.begin(), spans_.end(), [](const Span& a, const Span& b) { return LaterSpan()(b, a); });
    if (options_.shared) find_shared();
  }

  void run() {
    while (peek()) {
      const Span span = pop();
      const ReadMode mode = mode_at(span.begin);
      if (has_rows_apart(transfer_of(span), options_.merge_gap_bytes)) {
        read_rows(span, mode);
        continue;
      }
      const std::optional<ByteRange> in_place = in_place_part(span, span.begin, mode);
      if (in_place && in_place->begin == span.begin) {
        read_in_place(span, *in_place, mode);
      } else {
        rest_.push(span);
        read_staged(mode);
      }
    }
    close_chunk();
  }

 private:
  void find_shared() {
    std::vector<ByteRange> tensors;
    for (const auto& [file, bytes] : options_.shared->tensors) {
      if (file == file_) tensors.push_back(bytes);
    }
    std::ranges::sort(tensors, {}, &ByteRange::begin);
    std::vector<ByteRange> needed;
    for (const Span& span : spans_) {
      const Transfer& transfer = transfer_of(span);
      if (has_rows_apart(transfer, options_.merge_gap_bytes)) continue;
      const ByteRange bytes{span.begin, span.end};
      needed.push_back(bytes);
      // One that reaches beyond a tensor brings the small neighbours of a value.
      const auto tensor = std::ranges::lower_bound(tensors, bytes.begin, {}, &ByteRange::begin);
      const bool holds_tensor = tensor != tensors.end() && tensor->end <= bytes.end;
      if (holds_tensor || occupied_bytes(transfer, span.first, span.last) < bytes.size()) shared_.push_back(bytes);
    }
    needed = unite(std::move(needed));
    for (const ByteRange& tensor : tensors) {  // those that several transfers take apart
      const auto behind = first_ending_behind(needed, tensor.begin);
      if (behind != needed.end() && behind->begin <= tensor.begin && tensor.end <= behind->end)
        shared_.push_back(tensor);
    }
    shared_ = unite(std::move(shared_));
  }

  // REQUIRES: sorted, disjoint ranges.
  static std::vector<ByteRange>::const_iterator first_ending_behind(const std::vector<ByteRange>& ranges,
                                                                    int64_t offset) {
    return std::upper_bound(ranges.begin(), ranges.end(), offset,
                            [](int64_t at, const ByteRange& range) { return at < range.end; });
  }

  const Span* peek() const {
    const Span* next = next_ < spans_.size() ? &spans_[next_] : nullptr;
    if (!rest_.empty() && (!next || !LaterSpan()(rest_.top(), *next))) next = &rest_.top();
    return next;
  }

  Span pop() {
    const Span* next = peek();
    const Span span = *next;
    if (!rest_.empty() && next == &rest_.top()) {
      rest_.pop();
    } else {
      ++next_;
    }
    return span;
  }

  const Transfer& transfer_of(const Span& span) const { return plan_.transfers[static_cast<size_t>(span.transfer)]; }

  ReadMode mode_at(int64_t offset) {
    const ReadMode mode = window_mode_at(offset);
    const auto shared = first_ending_behind(shared_, offset);
    return mode.direct && shared != shared_.end() && shared->begin <= offset ? ReadMode{} : mode;
  }

  ReadMode window_mode_at(int64_t offset) {
    const int64_t window = offset / kModeWindow;
    const auto it = modes_.find(window);
    if (it != modes_.end()) return it->second;
    const ByteRange range{window * kModeWindow, (window + 1) * kModeWindow};
    return modes_.emplace(window, options_.mode_of(file_, range)).first->second;
  }

  // The first byte from which on the file is read in another way, or `limit`.
  int64_t mode_end(int64_t begin, int64_t limit, const ReadMode& mode) {
    for (int64_t edge = begin;;) {
      const int64_t window_end = align_down(edge, kModeWindow) + kModeWindow;
      const auto shared = first_ending_behind(shared_, edge);
      const int64_t shared_edge =
          shared == shared_.end() ? window_end : (shared->begin > edge ? shared->begin : shared->end);
      edge = std::min(window_end, shared_edge);
      if (edge >= limit) return limit;
      if (mode_at(edge) != mode) return edge;
    }
  }

  // Lists the steps of large destinations that these bytes are about to fill; once each, in the order of need. Returns
  // the position in Plan::preparations of the last one to wait for, or -1.
  int32_t prepare(const Transfer& transfer, const std::byte* begin, const std::byte* end, bool direct) {
    Destination* destination = destinations_.find(transfer);
    if (!destination) return -1;
    const ByteRange memory = destination->memory;
    const int64_t first_step = memory.begin / kPrepareStep;
    int32_t last = -1;
    for (int64_t step = reinterpret_cast<int64_t>(begin) / kPrepareStep;
         step <= (reinterpret_cast<int64_t>(end) - 1) / kPrepareStep; ++step) {
      int32_t& preparation = destination->preparations[static_cast<size_t>(step - first_step)];
      const ByteRange part{std::max(memory.begin, step * kPrepareStep),  //
                           std::min(memory.end, (step + 1) * kPrepareStep)};
      if (direct && preparation < 0) {
        preparation = static_cast<int32_t>(plan_.preparations.size());
        plan_.preparations.push_back(part);
      } else if (preparation == Destination::kNotListed) {
        preparation = Destination::kAdvised;
        plan_.advised.push_back(part);
      }
      last = std::max(last, preparation);
    }
    return direct ? last : -1;
  }

  void prepare_for(const Transfer& transfer, int64_t first, int64_t last, bool direct) {
    if (transfer.is_plain()) {
      prepare(transfer, transfer.dst + first, transfer.dst + last, direct);
    } else {
      prepare(transfer, transfer.dst, transfer.dst + destination_bounds(transfer).size(), direct);
    }
  }

  // Whether a span begins where another one ends, in the file and in memory: one read can fill both.
  bool continues(const Span& span, int64_t end, const Transfer& before) {
    const Transfer& transfer = transfer_of(span);
    return span.begin == end && transfer.is_plain() && transfer.device == kHost &&
           reinterpret_cast<int64_t>(transfer.dst) - transfer.src_offset ==
               reinterpret_cast<int64_t>(before.dst) - before.src_offset &&
           destinations_.find(transfer) == destinations_.find(before);
  }

  // The end of the run that a span, just popped, is part of: it and those behind it that continue it, up to the end of
  // a chunk at which it has `least` bytes from `begin` on. Bytes that another transfer needs too end it, since they go
  // through staging, where both can take them.
  int64_t run_end(const Span& span, int64_t begin, int64_t least) {
    // Whatever begins inside of a run is part of it.
    if (run_.begin <= span.begin && span.begin < run_.end && (run_is_whole_ || run_.end - begin >= least)) {
      return run_.end;
    }
    const int64_t limit = align_up(std::max(span.end, begin + least), options_.chunk_bytes);
    int64_t end = span.end;
    run_is_whole_ = true;
    for (size_t i = next_; i < spans_.size() && spans_[i].begin <= end; ++i) {
      if (spans_[i].begin < end) {
        end = spans_[i].begin;
        break;
      }
      if (!continues(spans_[i], end, transfer_of(span))) break;
      if (end >= limit) {
        run_is_whole_ = false;
        end = limit;
        break;
      }
      end = spans_[i].end;
    }
    if (!rest_.empty() && rest_.top().begin <= end) {
      run_is_whole_ = true;
      end = rest_.top().begin;
    }
    run_ = {span.begin, end};
    return end;
  }

  // The part of the run of a span, just popped, that can be read straight into its destinations, if that is worth it.
  // `from` is the end of what is read already.
  std::optional<ByteRange> in_place_part(const Span& span, int64_t from, const ReadMode& mode) {
    const Transfer& transfer = transfer_of(span);
    if (!transfer.is_plain() || transfer.device != kHost) return std::nullopt;
    // A multiple of both, so that where the file is cut further on, memory is aligned too.
    const int64_t alignment = std::max(mode.offset_alignment, mode.memory_alignment);
    const int64_t begin = align_up(std::max(span.begin, from), alignment);
    if (mode.direct) {
      // Direct reads into small pages are slower than through staging (many more segments for the device).
      if (!destinations_.find(transfer)) return std::nullopt;
      const int64_t address = reinterpret_cast<int64_t>(transfer.dst) + (begin - transfer.src_offset);
      if (!is_aligned(address, mode.memory_alignment)) return std::nullopt;
    }
    const int64_t run = run_end(span, begin, kMinInPlaceBytes + alignment);
    if (run - begin < kMinInPlaceBytes) return std::nullopt;
    const ByteRange part{begin, align_down(mode_end(begin, run, mode), alignment)};
    if (part.size() < kMinInPlaceBytes) return std::nullopt;
    return part;
  }

  // REQUIRES: the part begins where the span does.
  void read_in_place(const Span& span, ByteRange part, const ReadMode& mode) {
    const Transfer& transfer = transfer_of(span);
    Span last = span;  // that a read begins in
    for (int64_t at = part.begin; at < part.end;) {
      // Cuts lie at multiples of the chunk size in the file, so that they are aligned whatever the alignment is.
      const int64_t end = std::min(part.end, align_down(at, options_.chunk_bytes) + options_.chunk_bytes);
      close_chunk();
      while (last.end <= at) last = pop();
      std::byte* destination = transfer.dst + (at - transfer.src_offset);
      plan_.chunks.push_back({static_cast<int32_t>(plan_.reads.size()), 1, static_cast<int64_t>(plan_.pieces.size()), 0,
                              0, mode.direct, mode.cached,
                              prepare(transfer, destination, destination + (end - at), mode.direct)});
      plan_.reads.push_back({file_, at, end - at, end, destination, 0, transfer_of(last).id});
      at = end;
    }
    plan_.bytes_needed += part.size();
    plan_.bytes_read += part.size();
    while (last.end < part.end) last = pop();
    if (part.end < last.end) keep_rest(last, elements_ending_by(transfer_of(last), part.end));
  }

  // Puts back what lies behind the elements before `first`.
  void keep_rest(const Span& span, int64_t first) {
    const Transfer& transfer = transfer_of(span);
    rest_.push({transfer.src_offset + source_byte(transfer, first), span.end, span.transfer, first, span.last});
  }

  void read_staged(const ReadMode& mode) {
    const int64_t begin = peek()->begin;
    const int64_t submitted_begin = align_down(begin, mode.offset_alignment);
    // On a grid in the file, so that a direct read begins where the one before ended. Granules don't keep to it.
    const int64_t cell = transfer_of(*peek()).op ? submitted_begin : align_down(begin, options_.chunk_bytes);
    const int64_t limit = mode_end(begin, cell + options_.chunk_bytes, mode);
    const auto first_piece = static_cast<int64_t>(plan_.pieces.size());
    const auto read = static_cast<int32_t>(plan_.reads.size());
    int64_t end = begin;
    int64_t needed = 0;
    bool gapless = true;
    while (peek() && peek()->begin < limit && peek()->begin - end <= options_.merge_gap_bytes &&
           !has_rows_apart(transfer_of(*peek()), options_.merge_gap_bytes)) {
      const Span span = pop();
      const Transfer& transfer = transfer_of(span);
      const std::optional<ByteRange> in_place = in_place_part(span, end, mode);
      const int64_t stop = in_place ? std::min(limit, in_place->begin) : limit;
      int64_t last = span.last;
      if (stop < span.end) {
        last = elements_ending_by(transfer, stop);
        last -= last % transfer.granule();
      }
      if (last <= span.first) {
        // Not one element or granule fits. At the start of a read it is taken all the same: it straddles a border.
        if (static_cast<int64_t>(plan_.pieces.size()) > first_piece) {
          rest_.push(span);
          break;
        }
        last = transfer.op ? span.first + transfer.granule()
                           : elements_ending_by(transfer, element_end(transfer, span.first));  // repeats included
        last = std::min(span.last, last);
      }
      const int64_t piece_end = element_end(transfer, last - 1);
      const int64_t occupied = occupied_bytes(transfer, span.first, last);
      plan_.pieces.push_back({span.transfer, read, span.first, last});
      prepare_for(transfer, span.first, last, mode.direct);
      gapless = gapless && occupied == piece_end - span.begin;
      needed += occupied;
      if (gapless && span.begin < end) needed -= std::min(end, piece_end) - span.begin;  // needed twice, read once
      end = std::max(end, piece_end);
      if (last < span.last) keep_rest(span, last);
    }
    needed = std::min(needed, end - begin);
    const int64_t submitted_end = align_up(end, mode.offset_alignment);
    const int64_t length = submitted_end - submitted_begin;
    plan_.bytes_needed += needed;
    plan_.bytes_read += length;
    const int64_t transfer_id =
        plan_.transfers[static_cast<size_t>(plan_.pieces[static_cast<size_t>(first_piece)].transfer)].id;
    // Side by side in the staging buffer: the pieces see one read.
    std::vector<Read> reads;
    add_reads(submitted_begin, length, end, 0, transfer_id, reads);
    add_to_chunk(reads, align_up(length, kStagingAlignment), mode, first_piece);
  }

  // Reads of [offset, offset + length), of which the bytes before `needed_end` are needed: as many as that takes, side
  // by side in the staging buffer.
  void add_reads(int64_t offset, int64_t length, int64_t needed_end, int64_t staging_offset, int64_t transfer_id,
                 std::vector<Read>& reads) const {
    for (int64_t at = 0; at < length; at += options_.chunk_bytes) {
      const int64_t part = std::min(options_.chunk_bytes, length - at);
      const int64_t end = std::min(needed_end, offset + at + part);
      reads.push_back({file_, offset + at, part, end, nullptr, staging_offset + at, transfer_id});
    }
  }

  // Reads the rows of one granule each on its own.
  void read_rows(const Span& span, const ReadMode& mode) {
    const Transfer& transfer = transfer_of(span);
    const int64_t row_bytes = transfer.op->source().row_bytes;
    const auto first_piece = static_cast<int64_t>(plan_.pieces.size());
    std::vector<Read> reads;
    int64_t staging_bytes = 0;
    for (int64_t first = span.first; first < span.last; first += row_bytes) {
      const int64_t begin = transfer.src_offset + source_byte(transfer, first);
      const int64_t end = begin + row_bytes;
      const int64_t submitted_begin = align_down(begin, mode.offset_alignment);
      const int64_t length = align_up(end, mode.offset_alignment) - submitted_begin;
      add_reads(submitted_begin, length, end, staging_bytes, transfer.id, reads);
      staging_bytes += align_up(length, kStagingAlignment);
      plan_.bytes_read += length;
    }
    plan_.bytes_needed += span.last - span.first;
    plan_.pieces.push_back({span.transfer, static_cast<int32_t>(plan_.reads.size()), span.first, span.last});
    prepare_for(transfer, span.first, span.last, mode.direct);
    add_to_chunk(reads, staging_bytes, mode, first_piece);
  }

  // Puts reads, and the pieces from `first_piece` on, which arrive with all of them, into one chunk: the open one, or a
  // new one if that has no room. The reads' staging offsets count from the first of them.
  void add_to_chunk(const std::vector<Read>& reads, int64_t staging_bytes, const ReadMode& mode, int64_t first_piece) {
    const auto num_reads = static_cast<int32_t>(reads.size());
    if (chunk_ && (chunk_->direct != mode.direct || chunk_->cached != mode.cached ||
                   chunk_->num_reads + num_reads > kMaxReadsPerChunk ||
                   chunk_->staging_bytes + staging_bytes > options_.chunk_bytes)) {
      close_chunk();
    }
    if (!chunk_) {
      chunk_ = Chunk{static_cast<int32_t>(plan_.reads.size()), 0, first_piece, 0, 0, mode.direct, mode.cached, -1};
    }
    for (Read read : reads) {
      read.staging_offset += chunk_->staging_bytes;
      plan_.reads.push_back(read);
    }
    for (auto piece = plan_.pieces.begin() + first_piece; piece != plan_.pieces.end(); ++piece) {
      piece->num_reads = num_reads;
      note_whole_op(plan_.transfers[static_cast<size_t>(piece->transfer)], staging_bytes);
      ++chunk_->num_pieces;
    }
    chunk_->num_reads += num_reads;
    chunk_->staging_bytes += staging_bytes;
  }

  void note_whole_op(const Transfer& transfer, int64_t staging_bytes) {
    if (!transfer.op || !transfer.op->needs_whole_source() || staging_bytes <= options_.chunk_bytes) return;
    ++plan_.num_whole_ops;
    plan_.whole_op_bytes = std::max(plan_.whole_op_bytes, staging_bytes);
  }

  void close_chunk() {
    if (chunk_) plan_.chunks.push_back(*chunk_);
    chunk_.reset();
  }

  Plan& plan_;
  const PlanOptions& options_;
  Destinations& destinations_;
  const int32_t file_;
  std::vector<Span> spans_;  // sorted
  size_t next_ = 0;          // first not taken
  std::priority_queue<Span, std::vector<Span>, LaterSpan> rest_;
  ByteRange run_;                      // see run_end(): the last one that was looked for, from there on
  bool run_is_whole_ = false;          // it does not go on behind its end
  std::map<int64_t, ReadMode> modes_;  // of windows
  std::vector<ByteRange> shared_;      // what other processes read too: sorted, disjoint
  std::optional<Chunk> chunk_;         // the open one
};

}  // namespace

Plan plan_reads(std::vector<Transfer> transfers, const PlanOptions& options) {
  Plan plan;
  plan.transfers = std::move(transfers);
  std::map<int32_t, std::vector<Span>> spans_of_file;
  for (size_t i = 0; i < plan.transfers.size(); ++i) {
    const Transfer& transfer = plan.transfers[i];
    add_spans(transfer, static_cast<int32_t>(i), options.merge_gap_bytes, spans_of_file[transfer.file]);
  }
  Destinations destinations(plan.transfers, options.can_prepare);
  for (auto& [file, spans] : spans_of_file) FilePlanner(plan, options, destinations, file, std::move(spans)).run();
  return plan;
}

}  // namespace weightlift
