// Adam steps one after the other, on threads of their own.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "host_ops.h"

namespace host_ops {

// Computes runs of a step in the order in which they were submitted, while the caller moves the runs before.
//
// Threads flow from one run to the next: neither a barrier nor the interpreter stands between two tiles,
// which lets tiles be small enough to be still in the cache when they are sent on. They sleep between steps.
// The caller keeps the arrays alive until it has waited. One thread at a time may submit and wait.
class AdamQueue {
 public:
    AdamQueue(const KernelTable& kernels, int threads);
    ~AdamQueue();  // after all that was submitted
    AdamQueue(const AdamQueue&) = delete;
    AdamQueue& operator=(const AdamQueue&) = delete;

    // Returns the run's ticket. The output is left in the cache.
    int64_t submit(const AdamArgs& args, int64_t numel);
    // Until the run has been computed.
    void wait(int64_t ticket);

    // A forked child has the object and not its threads: there nobody may use it, or wait for its end.
    bool has_threads() const { return getpid() == owner_; }

 private:
    struct Run {
        int64_t ticket;
        AdamArgs args;
        int64_t numel;
        int64_t begun;     // elements that a thread has taken
        int64_t computed;  // elements that are done
    };

    void work();
    Run* next_run();  // the first with elements that nobody has taken

    const KernelTable& kernels_;
    const pid_t owner_ = getpid();
    std::mutex mutex_;  // for everything below
    std::condition_variable submitted_;
    std::condition_variable computed_;
    std::list<Run> runs_;  // not yet computed; a list, so that threads may hold on to an entry
    int64_t tickets_ = 0;
    bool closing_ = false;
    std::vector<std::thread> threads_;
};

// Ends a queue where its threads are; a forked child leaves it, to be gone with the child.
struct EndWithThreads {
    void operator()(AdamQueue* queue) const {
        if (queue->has_threads()) {
            delete queue;
        }
    }
};

}  // namespace host_ops
