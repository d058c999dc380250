// Teams of threads that divide a round of work into small jobs, with a barrier after each round.
//
// - All threads of a team run the same function; `each` gives the indices of a round to the threads that are free, then
//   waits for all of them.
// - Each caller borrows a team, so several callers compute in parallel. A single thread needs no team.
// - A waiting thread spins for some microseconds, then sleeps. On a core that other programs use too, spinning could keep
//   the very thread from running that it waits for. So a spin that ends in sleep makes the next spins shorter, one that
//   succeeds makes them longer, and from time to time a long spin tests whether the cores are free again.
// - Teams belong to a process; a forked child makes its own, since threads do not survive a fork.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <unistd.h>
#include <vector>

class Team {
  public:
    // A thread's view of the rounds of one run.
    class Round {
      public:
        Round(Team& team, int thread) : team_(team), thread_(thread) {}
        int thread() const { return thread_; }

        template <class Job>
        void each(int count, Job job) {
            if (team_.size_ == 1) {
                for (int i = 0; i < count; i++) job(i);
                return;
            }
            std::atomic<int>& next = team_.next_[phase_ % 3];
            for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) job(i);
            barrier();
        }

      private:
        void barrier() {
            int now = team_.generation_.load();
            if (team_.arrived_.fetch_add(1) + 1 == team_.size_) {
                team_.arrived_.store(0);
                team_.next_[(phase_ + 2) % 3].store(0);  // no thread uses that counter before the next barrier
                team_.generation_.fetch_add(1);
                team_.generation_.notify_all();
            } else {
                team_.wait(team_.generation_, now, team_.inside_);
            }
            phase_++;
        }
        Team& team_;
        int thread_, phase_ = 0;
    };

    // Run body(round) on this many threads, one of which is the caller.
    template <class Body>
    static void run(int threads, Body body) {
        if (threads == 1) {
            Team alone(1);
            Round round(alone, 0);
            body(round);
            return;
        }
        Team* team = borrow(threads);
        team->all([&](int thread) {
            Round round(*team, thread);
            body(round);
        });
        give_back(team);
    }

  private:
    static constexpr int SPINS = 1000;  // some tens of microseconds: longer than a barrier, far shorter than a time slice
    static constexpr int FEWEST = 8;    // half a microsecond
    static constexpr int TRY = 64;      // waits between two long spins, which then cost less than a microsecond per wait

    // How long it pays to spin, learnt from earlier waits. Threads race to adapt it, and any outcome is correct.
    struct Spin {
        std::atomic<int> limit{SPINS}, waits{0};
    };

    struct Idle {
        std::mutex guard;
        pid_t owner = 0;
        std::map<int, std::vector<Team*>> by_size;
    };

    static Idle& idle() {
        static Idle* teams = new Idle();  // never destroyed: threads may outlive static objects
        return *teams;
    }

    static Team* borrow(int threads) {
        Idle& teams = idle();
        std::lock_guard<std::mutex> lock(teams.guard);
        if (teams.owner != getpid()) {  // the parent's teams are not touched: their threads do not exist here
            teams.by_size.clear();
            teams.owner = getpid();
        }
        std::vector<Team*>& free = teams.by_size[threads];
        if (free.empty()) return new Team(threads);
        Team* team = free.back();
        free.pop_back();
        return team;
    }

    static void give_back(Team* team) {
        Idle& teams = idle();
        std::lock_guard<std::mutex> lock(teams.guard);
        teams.by_size[team->size_].push_back(team);
    }

    explicit Team(int size) : size_(size) {
        for (int index = 1; index < size; index++) std::thread([this, index] { work(index); }).detach();
    }

    void all(const std::function<void(int)>& body) {
        body_ = &body;
        for (auto& next : next_) next.store(0, std::memory_order_relaxed);
        pending_.store(size_ - 1, std::memory_order_relaxed);
        epoch_.fetch_add(1);
        epoch_.notify_all();
        body(0);
        // `body` and the counters may change only after every worker has finished.
        for (int left; (left = pending_.load()) != 0;) wait(pending_, left, inside_);
    }

    static void wait(std::atomic<int>& value, int old, Spin& spin) {
        const int usual = spin.limit.load(std::memory_order_relaxed);
        const bool tries = spin.waits.fetch_add(1, std::memory_order_relaxed) % TRY == 0;
        const int most = tries ? SPINS : usual;
        for (int i = 0; i < most; i++) {
            if (value.load(std::memory_order_acquire) != old) {
                if (i > 0 && usual < SPINS) spin.limit.store(usual * 2, std::memory_order_relaxed);
                return;
            }
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        if (usual > FEWEST) spin.limit.store(usual / 2, std::memory_order_relaxed);
        while (value.load(std::memory_order_acquire) == old) value.wait(old);
    }

    void work(int index) {
        for (int seen = 0;; seen++) {
            wait(epoch_, seen, between_);
            (*body_)(index);
            if (pending_.fetch_sub(1) == 1) pending_.notify_all();
        }
    }

    const int size_;
    const std::function<void(int)>* body_ = nullptr;
    Spin inside_, between_;  // waits within a run are short; waits between runs depend on the caller
    std::atomic<int> epoch_{0}, generation_{0}, arrived_{0}, pending_{0}, next_[3] = {};
};
