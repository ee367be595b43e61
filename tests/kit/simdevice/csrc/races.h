// Accesses that nothing orders: a happens-before check by vector clocks, and a watch on pinned memory.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace sim {

using StreamId = int64_t;                       // device * kStreams + number; number 0 is the device's main stream
using Progress = std::map<StreamId, uint64_t>;  // up to which task each stream is known to be over
constexpr StreamId kStreams = 1 << 20;

inline void join(Progress& into, const Progress& other) {
  for (const auto& [stream, task] : other) into[stream] = std::max(into[stream], task);
}
inline bool covers(const Progress& known, StreamId stream, uint64_t task) {
  const auto found = known.find(stream);
  return found != known.end() && found->second >= task;
}
inline std::string name_of(StreamId stream) {
  const auto number = stream % kStreams;
  return (number ? "stream " + std::to_string(number) : std::string("the main stream")) + " of sim:" +
         std::to_string(stream / kStreams);
}

struct Range {
  const char* begin = nullptr;
  const char* end = nullptr;
  bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
  bool within(const Range& other) const { return other.begin <= begin && end <= other.end; }
};
struct Access : Range {
  bool writes = false;
};
struct TaskId {
  StreamId stream = 0;
  uint64_t task = 0;
  std::string name;
  std::string text() const { return "'" + name + "' (task " + std::to_string(task) + " of " + name_of(stream) + ")"; }
};

class Races {
 public:
  std::vector<std::string> found;  // the first kMost; `count` counts all
  uint64_t count = 0;

  // Compares an access of `who` with earlier ones of other streams. `known`: what is over before `who` begins; `host`: what the
  // host knows to be over, and with it everything that is queued from now on.
  void look(const TaskId& who, const Access& access, const Progress& known, const Progress& host) {
    bool told = false;
    for (auto page = uintptr_t(access.begin) / kPage; page <= (uintptr_t(access.end) - 1) / kPage; page++) {
      auto& earlier = accesses_[page];
      for (const auto& [access2, who2] : earlier)
        if (!told && who2.stream != who.stream && (access.writes || access2.writes) && access.meets(access2) &&
            !covers(known, who2.stream, who2.task)) {
          told = true;
          report(who.text() + (access.writes ? " writes " : " reads ") + overlap(access, access2) + " bytes that " + who2.text() +
                 (access2.writes ? " writes" : " reads") + ", and nothing orders the two");
        }
      // What the host knows to be over can race with nothing; a later access of the same stream stands for the ones it covers.
      std::erase_if(earlier, [&](const Seen& e) {
        return covers(host, e.who.stream, e.who.task) ||
               (e.who.stream == who.stream && e.access.within(access) && (access.writes || !e.access.writes));
      });
      earlier.push_back({access, who});
    }
  }

  // The host must leave `source` as it is until it knows that `reader` is over.
  void watch(const TaskId& reader, Range source) { watches_.push_back({source, reader, hash(source)}); }
  // A task of the device writes there: what is found there later does not tell about the host.
  void written_by_device(Range target) {
    std::erase_if(watches_, [&](const Watch& watch) { return watch.source.meets(target); });
  }
  // The host has learnt that tasks are over, and may write to their sources from now on.
  void host_learns(const Progress& host) {
    std::erase_if(watches_, [&](const Watch& watch) {
      if (!covers(host, watch.reader.stream, watch.reader.task)) return false;
      if (hash(watch.source) != watch.hash)
        report("the host writes to pinned memory that " + watch.reader.text() + " reads, before it knows that the task is over");
      return true;
    });
  }
  void forget() { *this = Races(); }

 private:
  struct Seen {
    Access access;
    TaskId who;
  };
  struct Watch {
    Range source;
    TaskId reader;
    uint64_t hash;
  };
  static constexpr uintptr_t kPage = 1 << 20;
  static constexpr size_t kMost = 100;
  std::map<uintptr_t, std::vector<Seen>> accesses_;
  std::vector<Watch> watches_;

  static std::string overlap(const Range& a, const Range& b) {
    return std::to_string(std::min(a.end, b.end) - std::max(a.begin, b.begin));
  }
  static uint64_t hash(const Range& range) {  // FNV-1a, by words
    uint64_t value = 14695981039346656037u, word = 0;
    for (const char* at = range.begin; at < range.end; at += sizeof word) {
      std::memcpy(&word, at, std::min<size_t>(sizeof word, range.end - at));
      value = (value ^ word) * 1099511628211u;
    }
    return value;
  }
  void report(std::string text) {
    if (count++ < kMost) found.push_back(std::move(text));
  }
};

}  // namespace sim
