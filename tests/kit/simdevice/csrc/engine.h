// Streams of tasks, the schedule that decides when they run, and a virtual clock.
//
// A task runs on whichever thread makes it run, always under the engine's lock; so a task must not need Python, nor memory of the
// simulated device. One lock guards everything; functions that take a `Lock&` are called with it held. While it is held no
// reference to a tensor may be made or dropped: that may need Python's lock, whose owner may be waiting for this one.
#pragma once
#include <c10/util/Exception.h>

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <random>
#include <set>

#include "races.h"

namespace sim {

using Lock = std::unique_lock<std::mutex>;

enum class Schedule : int64_t {
  kSync,       // every task runs at once
  kLate,       // no task runs before somebody waits for it
  kSideEarly,  // side streams run at once, main streams late: copies in come before what should be over by then
  kSideLate,   // main streams run at once, side streams late: copies come after what should have waited for them
  kRandom,     // every stream has a mood, from lazy to eager, that changes now and then
};

enum Resource { kCompute, kCopyIn, kCopyOut };
struct Cost {
  double seconds = 0;
  Resource resource = kCompute;
  bool holds_host = false;  // a copy of pageable memory: the call lasts as long as the copy
};

// Rates of the machine that the virtual clock imitates: seconds, bytes/s, operations/s.
struct Rates {
  double launch = 5e-6, bandwidth = 1e12, flops = 60e12, half_flops = 120e12, link = 25e9, latency = 1e-5, pageable = 8e9;
};

// An event: a point in a stream. What has happened before it, and when that is in virtual time.
struct Moment {
  StreamId stream = -1;
  uint64_t task = 0;
  Progress known;
  double time = 0;
  int asked = 0;
};

struct Task {
  std::string name;
  std::function<void()> run;
  std::optional<std::pair<StreamId, uint64_t>> after;  // a task of another stream
  int64_t gate = 0;                                    // opened by the host when it has done its part
};

struct Counts {
  uint64_t host_waits = 0, pageable_in = 0, pageable_out = 0, pinned_in = 0, pinned_out = 0;
  std::map<int64_t, std::map<std::string, uint64_t>> kernels;  // by device and name
};

class Engine {
 public:
  std::mutex mutex;
  Races races;
  Rates rates;
  Counts counts;
  double host_time = 0;
  std::map<std::pair<int64_t, Resource>, double> busy;  // seconds of virtual work

  void configure(Lock& lock, Schedule schedule, uint64_t seed) {
    host_waits_for_all(lock);
    schedule_ = schedule;
    random_.seed(seed);
    races.forget();
    counts = {};
    host_time = 0;
    busy.clear();
    engine_free_.clear();
    error_.clear();
    for (auto& [id, stream] : streams_) stream.free_at = 0, stream.mood = draw_mood();
  }

  StreamId new_stream(int64_t device) { return device * kStreams + ++made_; }

  void push(Lock& lock, StreamId id, Task task, const std::vector<Access>& accesses, Cost cost) {
    check();
    Stream& stream = at(id);
    stream.asked++;
    join(stream.known, host_known_);
    stream.known[id] = stream.asked;
    const TaskId who{id, stream.asked, task.name};
    for (const auto& access : accesses)
      if (access.begin < access.end) races.look(who, access, stream.known, host_known_);
    if (task.run && cost.resource == kCompute) counts.kernels[id / kStreams][task.name]++;
    take_time(id, stream, task, cost);
    stream.queue.push_back(std::move(task));
    go_on();
  }
  TaskId last(StreamId id, std::string name) { return {id, at(id).asked, std::move(name)}; }

  Moment moment(StreamId id) {
    Stream& stream = at(id);
    Moment now{id, stream.asked, stream.known, stream.free_at, 0};
    join(now.known, host_known_);
    return now;
  }
  void wait(Lock& lock, StreamId id, const Moment& moment) {  // a stream for an event
    if (moment.stream < 0 || moment.stream == id) return;
    Stream& stream = at(id);
    join(stream.known, moment.known);
    stream.free_at = std::max(stream.free_at, moment.time);
    push(lock, id, {"wait for an event", {}, {{moment.stream, moment.task}}}, {}, {});
  }
  bool is_over(StreamId id, uint64_t task) { return at(id).done >= task; }
  bool query(Moment& moment) {
    if (moment.stream < 0) return true;
    if (++moment.asked > kPatience) run_what_can(moment.stream, moment.task);  // who asks again and again waits
    if (!is_over(moment.stream, moment.task)) return false;
    host_knows(moment);
    check();
    return true;
  }

  void host_waits(Lock& lock, const Moment& moment) {
    if (moment.stream < 0) return;
    counts.host_waits++;
    force(lock, moment.stream, moment.task);
    host_knows(moment);
    check();
  }
  // As the driver does before it takes memory away. Not counted: the program did not ask for it.
  void host_waits_for_all(Lock& lock, int64_t device = -1) {
    for (auto& [id, stream] : streams_)
      if (device < 0 || id / kStreams == device) {
        const Moment now = moment(id);
        force(lock, id, now.task);
        host_knows(now);
      }
  }
  void host_knows(const Moment& moment) {
    join(host_known_, moment.known);
    host_time = std::max(host_time, moment.time);
    races.host_learns(host_known_);
  }
  // The allocator found these tasks over: the host knows, and all that is queued from now on.
  void host_found_over(const Progress& tasks) {
    join(host_known_, tasks);
    races.host_learns(host_known_);
  }
  Progress all_asked() const {
    Progress all;
    for (const auto& [id, stream] : streams_) all[id] = stream.asked;
    return all;
  }
  bool all_over(const Progress& tasks) {
    return std::all_of(tasks.begin(), tasks.end(), [&](const auto& t) { return is_over(t.first, t.second); });
  }

  int64_t new_gate() { return closed_.insert(++gates_), gates_; }
  void open_gate(int64_t gate) {
    closed_.erase(gate);
    go_on();
    gate_opened_.notify_all();
  }

  double makespan() const {
    double end = host_time;
    for (const auto& [id, stream] : streams_) end = std::max(end, stream.free_at);
    return end;
  }
  void check() const { TORCH_CHECK(error_.empty(), error_); }

 private:
  struct Stream {
    std::deque<Task> queue;
    uint64_t asked = 0, done = 0;
    Progress known;      // what is over before the next task begins
    double free_at = 0;  // virtual
    double mood = 0;     // the chance, under kRandom, that a task runs whenever something is queued
  };
  static constexpr int kPatience = 20;
  Schedule schedule_ = Schedule::kSync;
  std::mt19937_64 random_;
  std::map<StreamId, Stream> streams_;
  Progress host_known_;
  std::map<std::pair<int64_t, Resource>, double> engine_free_;
  std::string error_;
  int64_t made_ = 0, gates_ = 0;
  std::set<int64_t> closed_;
  std::condition_variable gate_opened_;

  Stream& at(StreamId id) {
    const auto [found, is_new] = streams_.try_emplace(id);
    if (is_new) found->second.mood = draw_mood();
    return found->second;
  }
  double draw_mood() {
    constexpr std::array<double, 4> kMoods{0.0, 0.0, 0.5, 0.99};
    return kMoods[random_() % kMoods.size()];
  }

  void take_time(StreamId id, Stream& stream, const Task& task, const Cost& cost) {
    if (!task.run) return;
    host_time += rates.launch;
    const std::pair which{id / kStreams, cost.resource};
    double start = std::max(stream.free_at, host_time);
    if (cost.resource != kCompute) start = std::max(start, engine_free_[which]);
    stream.free_at = start + cost.seconds;
    if (cost.resource != kCompute) engine_free_[which] = stream.free_at;
    busy[which] += cost.seconds;
    if (cost.holds_host) host_time = stream.free_at;
  }

  // Runs the next task of `id`, or of the stream that it has to wait for. False if a closed gate is in the way.
  bool step(StreamId id) {
    while (const auto& after = at(id).queue.front().after) {
      if (is_over(after->first, after->second)) break;
      id = after->first;
    }
    Stream& stream = at(id);
    if (closed_.count(stream.queue.front().gate)) return false;
    const Task task = std::move(stream.queue.front());
    stream.queue.pop_front();
    stream.done++;
    if (!task.run || !error_.empty()) return true;
    try {
      task.run();
    } catch (const c10::Error& error) {
      error_ = "sim: '" + task.name + "' on " + name_of(id) +
               " failed while it ran, some time after it was queued; the device is of no use from now on. " +
               error.what_without_backtrace();
    }
    return true;
  }
  void run_what_can(StreamId id, uint64_t task) {
    while (at(id).done < task && step(id)) {
    }
  }
  void force(Lock& lock, StreamId id, uint64_t task) {
    while (at(id).done < task)
      if (!step(id)) gate_opened_.wait(lock);
  }
  // What the schedule lets run now. Never sleeps.
  void go_on() {
    for (auto& [id, stream] : streams_) {
      const bool side = id % kStreams != 0;
      if (schedule_ == Schedule::kSync || (schedule_ == Schedule::kSideEarly && side) ||
          (schedule_ == Schedule::kSideLate && !side))
        run_what_can(id, stream.asked);
      else if (schedule_ == Schedule::kRandom) {
        if (random_() % 64 == 0) stream.mood = draw_mood();
        while (!stream.queue.empty() && chance(stream.mood) && step(id)) {
        }
      }
    }
  }
  bool chance(double of) { return double(random_() >> 11) * 0x1p-53 < of; }
};

inline Engine& engine() {
  static auto* engine = new Engine;  // lives as long as the process: deleters of tensors come late
  return *engine;
}

}  // namespace sim
