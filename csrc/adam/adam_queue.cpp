#include "adam_queue.h"

#include <algorithm>

#include "dispatch.h"
#include "flush_denormals.h"

namespace host_ops {

AdamQueue::AdamQueue(const KernelTable& kernels, int threads) : kernels_(kernels) {
    for (int i = 0; i < std::max(threads, 1); ++i) {
        threads_.emplace_back([this] { work(); });
    }
}

AdamQueue::~AdamQueue() {
    {
        const std::lock_guard<std::mutex> guard(mutex_);
        closing_ = true;
    }
    submitted_.notify_all();
    for (std::thread& thread : threads_) {
        thread.join();
    }
}

int64_t AdamQueue::submit(const AdamArgs& args, int64_t numel) {
    int64_t ticket = 0;
    {
        const std::lock_guard<std::mutex> guard(mutex_);
        ticket = tickets_++;
        if (numel > 0) {
            runs_.push_back({ticket, args, numel, 0, 0});
        }
    }
    submitted_.notify_all();
    return ticket;
}

void AdamQueue::wait(int64_t ticket) {
    std::unique_lock<std::mutex> lock(mutex_);
    computed_.wait(lock, [&] {
        return std::none_of(runs_.begin(), runs_.end(), [&](const Run& run) { return run.ticket == ticket; });
    });
}

AdamQueue::Run* AdamQueue::next_run() {
    for (Run& run : runs_) {
        if (run.begun < run.numel) {
            return &run;
        }
    }
    return nullptr;
}

void AdamQueue::work() {
    const FlushDenormals flush;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        Run* const run = next_run();
        if (run == nullptr) {
            if (closing_) {
                return;
            }
            submitted_.wait(lock);
            continue;
        }
        const int64_t begin = run->begun;
        const int64_t end = std::min(begin + kTaskNumel, run->numel);
        run->begun = end;
        lock.unlock();
        kernels_.adam(run->args, begin, end);
        lock.lock();
        run->computed += end - begin;
        if (run->computed == run->numel) {
            const int64_t ticket = run->ticket;
            runs_.remove_if([&](const Run& other) { return other.ticket == ticket; });
            computed_.notify_all();
        }
    }
}

}  // namespace host_ops
