// Threads of the core: named for debuggers, and deaf to signals, which belong to the main thread (Ctrl-C).
#pragma once

#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <thread>
#include <utility>

namespace weightlift {

// Blocks every signal of the calling thread while it lives; threads started meanwhile inherit that.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

// REQUIRES: name has at most 15 characters. Throws std::system_error when there can be no more threads.
template <typename Function>
std::thread start_thread(const char* name, Function&& function) {
  const SignalsBlocked blocked;
  try {
    std::thread thread(std::forward<Function>(function));
    pthread_setname_np(thread.native_handle(), name);
    return thread;
  } catch (const std::system_error& error) {
    throw std::system_error(error.code(),
                            "no further thread can be started; raise ulimit -u, or the control group's pids.max");
  }
}

}  // namespace weightlift
