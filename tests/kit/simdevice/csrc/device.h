// What PyTorch asks of a device: devices, streams, events, generators.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace sim {

// The device's random numbers: a CPU generator of its own, so that the same seed gives the CPU's numbers.
struct Generator final : c10::GeneratorImpl {
  at::Generator cpu = at::detail::createCPUGenerator();

  explicit Generator(c10::DeviceIndex device)
      : c10::GeneratorImpl({kSim, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  static c10::DeviceType device_type() { return kSim; }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->cpu = cpu.clone();
    return copy;
  }
};
inline const at::Generator& default_generator(int64_t device) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>;
    for (int64_t d = 0; d < device_count(); d++) all->push_back(at::make_generator<Generator>(c10::DeviceIndex(d)));
    return all;
  }();
  return generators->at(device < 0 ? current_device : device);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::Device getDevice() const override { return {kSim, static_cast<c10::DeviceIndex>(current_device)}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count(), "sim: there is no device ", device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }

  static c10::Stream stream(c10::Device device, StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }
  c10::Device with_index(c10::Device device) const { return device.has_index() ? device : getDevice(); }
  c10::Stream getStream(c10::Device device) const override {
    device = with_index(device);
    return stream(device, current_stream(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    device = with_index(device);
    return stream(device, device.index() * kStreams);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    device = with_index(device);
    Lock lock(engine().mutex);
    return stream(device, engine().new_stream(device.index()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const auto before = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(engine().mutex);
    Moment now = engine().moment(stream.id());
    return engine().query(now);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock(engine().mutex);
    engine().host_waits(lock, engine().moment(stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Lock lock(engine().mutex);
    engine().counts.host_waits++;
    engine().host_waits_for_all(lock, device);
    engine().check();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator().recordStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock(engine().mutex);
    if (!*event) *event = new Moment;
    *static_cast<Moment*>(*event) = engine().moment(stream.id());
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Moment*>(event); }
  void block(void* event, const c10::Stream& stream) const override {
    Lock lock(engine().mutex);
    if (event) engine().wait(lock, stream.id(), *static_cast<Moment*>(event));
  }
  bool queryEvent(void* event) const override {
    Lock lock(engine().mutex);
    return !event || engine().query(*static_cast<Moment*>(event));
  }
  void synchronizeEvent(void* event) const override {
    Lock lock(engine().mutex);
    if (event) engine().host_waits(lock, *static_cast<Moment*>(event));
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {  // virtual milliseconds
    return (static_cast<Moment*>(end)->time - static_cast<Moment*>(begin)->time) * 1e3;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  c10::DeviceIndex getCurrentDevice() const override { return Guard().getDevice().index(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kSim, device}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kSim, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* address) const override {
    Lock lock(engine().mutex);
    return pinned().contains(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? getCurrentDevice() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::Device before = Guard().exchangeDevice(storage.device());
    auto data = allocator().allocate(bytes);
    if (const size_t kept = std::min(bytes, storage.nbytes())) allocator().copy_data(data.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
    Guard().setDevice(before);
  }
};

}  // namespace sim
