// Memory of the devices, which the host cannot touch, and pinned memory of the host, which the devices can.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

#include "engine.h"

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

inline int64_t device_count() {
  static const int64_t count = std::getenv("SIM_DEVICES") ? std::atoll(std::getenv("SIM_DEVICES")) : 1;
  return count;
}
inline thread_local int64_t current_device = 0;
inline thread_local std::map<int64_t, StreamId> current_streams;  // by device; absent: its main stream
inline StreamId current_stream(int64_t device = current_device) {
  const auto found = current_streams.find(device);
  return found == current_streams.end() ? device * kStreams : found->second;
}

// The pages of all devices, mapped twice: tensors have addresses of a map that is closed, kernels use the open one.
class Pages {
 public:
  static constexpr size_t kPerDevice = size_t(16) << 30;  // addresses; pages are there once they are written
  Pages() {
    const size_t all = kPerDevice * device_count();
    file_ = memfd_create("sim", MFD_CLOEXEC);
    TORCH_CHECK(file_ >= 0 && ftruncate(file_, all) == 0, "no memory for simulated devices");
    closed_ = static_cast<char*>(mmap(nullptr, all, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file_, 0));
    open_ = static_cast<char*>(mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0));
    TORCH_CHECK(closed_ != MAP_FAILED && open_ != MAP_FAILED, "no addresses for simulated devices");
  }
  char* address(int64_t device, size_t at) const { return closed_ + device * kPerDevice + at; }
  char* opened(const void* address) const { return open_ + (static_cast<const char*>(address) - closed_); }
  void give_back(int64_t device, size_t at, size_t size) const {
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, device * kPerDevice + at, size);
  }

 private:
  int file_;
  char *closed_, *open_;
};
inline const Pages& pages() {
  static const auto* pages = new Pages;
  return *pages;
}

// One device's memory. A block belongs to the stream that asked for it and is that stream's next one as soon as it is freed,
// because what the stream does is in order anyway. Blocks that other streams use (record_stream) wait until those are over.
class Pool {
 public:
  size_t limit = size_t(1) << 30, used = 0, cached = 0, peak = 0, peak_reserved = 0;
  int64_t out_of_memory = 0;

  explicit Pool(int64_t device) : device_(device) {}

  void* allocate(Lock& lock, size_t bytes, StreamId stream) {
    const size_t size = (bytes + kRound - 1) / kRound * kRound;
    collect();
    auto block = from_cache(size, stream);
    if (!block) block = fresh(size, stream);
    if (!block) {
      empty_cache(lock);
      block = fresh(size, stream);
    }
    if (!block) {
      out_of_memory++;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "sim:", device_, " out of memory: ", size, " bytes asked for, ", used, " of ",
                       limit, " in use");
    }
    used += block->size;
    peak = std::max(peak, used);
    peak_reserved = std::max(peak_reserved, used + cached);
    void* address = pages().address(device_, block->at);
    live_[address] = *block;
    return address;
  }
  void free(void* address) {
    const auto found = live_.find(address);
    Block block = std::move(found->second);
    live_.erase(found);
    used -= block.size;
    cached += block.size;
    (block.others.empty() ? free_ : pending_).push_back(std::move(block));
  }
  void record_stream(const void* address, StreamId stream) {
    const auto found = live_.find(const_cast<void*>(address));
    if (found != live_.end() && found->second.stream != stream)
      found->second.others[stream] = engine().moment(stream).task;
  }
  // cudaFree waits for the whole device; so does this.
  void empty_cache(Lock& lock) {
    engine().host_waits_for_all(lock, device_);
    collect();
    for (const auto& block : free_) {
      cached -= block.size;
      gaps_[block.at] = block.size;
      pages().give_back(device_, block.at, block.size);
    }
    free_.clear();
    for (auto gap = gaps_.begin(); gap != gaps_.end();) {
      const auto next = std::next(gap);
      if (next == gaps_.end() || gap->first + gap->second != next->first) {
        gap = next;
        continue;
      }
      gap->second += next->second;
      gaps_.erase(next);
    }
  }

 private:
  struct Block {
    size_t at, size;
    StreamId stream;
    Progress others;
  };
  static constexpr size_t kRound = 512;
  int64_t device_;
  std::map<void*, Block> live_;
  std::vector<Block> free_, pending_;
  std::map<size_t, size_t> gaps_{{0, Pages::kPerDevice}};

  std::optional<Block> from_cache(size_t size, StreamId stream) {
    auto best = free_.end();
    for (auto block = free_.begin(); block != free_.end(); ++block) {
      const bool fits = block->stream == stream && block->size >= size && block->size <= std::max(2 * size, size + (1 << 20));
      if (fits && (best == free_.end() || block->size < best->size)) best = block;
    }
    if (best == free_.end()) return {};
    const Block block = std::move(*best);
    free_.erase(best);
    cached -= block.size;
    return block;
  }
  std::optional<Block> fresh(size_t size, StreamId stream) {
    if (used + cached + size > limit) return {};
    const auto gap = std::find_if(gaps_.begin(), gaps_.end(), [&](const auto& gap) { return gap.second >= size; });
    if (gap == gaps_.end()) return {};
    const auto [at, room] = *gap;
    gaps_.erase(gap);
    if (room > size) gaps_[at + size] = room - size;
    return Block{at, size, stream, {}};
  }
  void collect() {
    std::erase_if(pending_, [&](Block& block) {
      if (!engine().all_over(block.others)) return false;
      engine().host_found_over(block.others);
      block.others.clear();
      free_.push_back(block);
      return true;
    });
  }
};
inline Pool& pool(int64_t device) {
  static auto* pools = new std::map<int64_t, Pool>;
  return pools->try_emplace(device, device).first->second;
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kSim, static_cast<c10::DeviceIndex>(current_device));
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    Lock lock(engine().mutex);
    engine().check();
    void* address = pool(current_device).allocate(lock, bytes, current_stream());
    return {address, address, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    Lock lock(engine().mutex);
    engine().host_waits_for_all(lock);
    std::memcpy(pages().opened(to), pages().opened(from), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Lock lock(engine().mutex);
    for (int64_t device = 0; device < device_count(); device++) pool(device).empty_cache(lock);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock(engine().mutex);
    if (data.get()) pool(data.device().index()).record_stream(data.get(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(engine().mutex);
    const Pool& of = pool(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = of.used;
    stats.allocated_bytes[0].peak = of.peak;
    stats.reserved_bytes[0].current = of.used + of.cached;
    stats.reserved_bytes[0].peak = of.peak_reserved;
    stats.num_ooms = of.out_of_memory;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(engine().mutex);
    Pool& of = pool(device);
    of.peak = of.used;
    of.peak_reserved = of.used + of.cached;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock(engine().mutex);
    const Pool& of = pool(device);
    return {of.limit - std::min(of.limit, of.used + of.cached), of.limit};
  }

 private:
  static void release(void* address) {
    if (!address) return;
    Lock lock(engine().mutex);
    const int64_t device = (static_cast<char*>(address) - pages().address(0, 0)) / Pages::kPerDevice;
    pool(device).free(address);
  }
};
inline Allocator& allocator() {
  static auto* allocator = new Allocator;
  return *allocator;
}

// Host memory that devices reach by themselves: allocated so, or registered later.
class Pinned final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* address = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    Lock lock(engine().mutex);
    std::erase_if(freed_, [&](const auto& freed) {
      if (!engine().all_over(freed.second)) return false;
      engine().host_found_over(freed.second);
      std::free(freed.first);
      return true;
    });
    if (address) ranges_[static_cast<char*>(address)] = bytes;
    return {address, address, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

  bool contains(const void* address) const {
    auto range = ranges_.upper_bound(static_cast<const char*>(address));
    return range != ranges_.begin() && (--range, address < range->first + range->second);
  }
  void add(const char* address, size_t bytes) {
    TORCH_CHECK(!contains(address), "sim: this memory is pinned already");
    ranges_[address] = bytes;
  }
  void remove(Lock& lock, const char* address) {
    TORCH_CHECK(ranges_.count(address), "sim: this memory is not pinned");
    engine().host_waits_for_all(lock);
    ranges_.erase(address);
  }

 private:
  std::map<const char*, size_t> ranges_;
  std::vector<std::pair<void*, Progress>> freed_;  // tasks may still use them

  static void release(void* address);
};
inline Pinned& pinned() {
  static auto* pinned = new Pinned;
  return *pinned;
}
inline void Pinned::release(void* address) {
  if (!address) return;
  Lock lock(engine().mutex);
  pinned().ranges_.erase(static_cast<char*>(address));
  pinned().freed_.emplace_back(address, engine().all_asked());
}

}  // namespace sim
