// A team of threads that share out small pieces of work, with a barrier after each round.
//
// - All threads run the same function; `each` hands out the indices of a round to whoever is free, then waits for all.
// - A waiting thread spins for some microseconds, then sleeps. On a core that somebody else wants too, spinning on
//   would keep the very thread from running that is waited for.
// - One team a process; a forked child gets a fresh one, since threads do not survive a fork.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unistd.h>
#include <vector>

class Team {
  public:
    static Team& of_process() {
        static std::mutex guard;
        static Team* team = nullptr;
        static pid_t owner = 0;
        std::lock_guard<std::mutex> lock(guard);
        if (!team || owner != getpid()) {  // the parent's team is left alone: its threads are not ours to stop
            team = new Team();
            owner = getpid();
        }
        return *team;
    }

    // Run body(thread) on `threads` threads, the caller being thread 0.
    void run(int threads, const std::function<void(int)>& body) {
        std::lock_guard<std::mutex> lock(one_at_a_time_);
        while (int(workers_.size()) < threads - 1) {
            int index = int(workers_.size()) + 1, epoch = epoch_.load();
            workers_.emplace_back([this, index, epoch] { work(index, epoch); });
            workers_.back().detach();
        }
        size_ = threads;
        body_ = &body;
        for (auto& c : next_) c.store(0, std::memory_order_relaxed);
        pending_.store(int(workers_.size()), std::memory_order_relaxed);
        epoch_.fetch_add(1);
        epoch_.notify_all();
        body(0);
        // Every worker checks in, also those that had nothing to do, before `body` and the counters may change.
        for (int left; (left = pending_.load()) != 0;) wait(pending_, left);
    }

    // A thread's view of the rounds of one run.
    class Round {
      public:
        Round(Team& team, int thread) : team_(team), thread_(thread) {}
        int thread() const { return thread_; }

        template <class Job>
        void each(int count, Job job) {
            std::atomic<int>& next = team_.next_[phase_ % 3];
            if (team_.size_ == 1)
                for (int i = 0; i < count; i++) job(i);
            else
                for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) job(i);
            barrier();
        }

      private:
        void barrier() {
            int now = team_.generation_.load();
            if (team_.arrived_.fetch_add(1) + 1 == team_.size_) {
                team_.arrived_.store(0);
                team_.next_[(phase_ + 2) % 3].store(0);  // nobody uses that one before the next barrier
                team_.generation_.fetch_add(1);
                team_.generation_.notify_all();
            } else {
                team_.wait(team_.generation_, now);
            }
            phase_++;
        }
        Team& team_;
        int thread_, phase_ = 0;
    };

  private:
    static constexpr int SPINS = 1000;  // some tens of microseconds: longer than a barrier, far shorter than a time slice

    static void wait(std::atomic<int>& value, int old) {
        for (int i = 0; i < SPINS; i++) {
            if (value.load(std::memory_order_acquire) != old) return;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        while (value.load(std::memory_order_acquire) == old) value.wait(old);
    }

    void work(int index, int seen) {
        for (;;) {
            wait(epoch_, seen);
            seen++;
            if (index < size_) (*body_)(index);
            if (pending_.fetch_sub(1) == 1) pending_.notify_all();
        }
    }

    std::mutex one_at_a_time_;
    std::vector<std::thread> workers_;
    const std::function<void(int)>* body_ = nullptr;
    int size_ = 1;
    std::atomic<int> epoch_{0}, generation_{0}, arrived_{0}, pending_{0}, next_[3] = {};
};
