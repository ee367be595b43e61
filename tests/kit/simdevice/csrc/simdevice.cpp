// A simulated accelerator for tests; see ../README.md.
#include <ATen/record_function.h>

#include "autocast.h"
#include "kernels.h"

namespace sim {
namespace {

Hooks hooks;
struct Start {
  Start() {
    c10::SetAllocator(kSim, &allocator());
    at::RegisterPrivateUse1HooksInterface(&hooks);
  }
} start;
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

void configure(int64_t schedule, int64_t seed, int64_t limit, bool perturb) {
  Lock lock(engine().mutex);
  engine().configure(lock, static_cast<Schedule>(schedule), seed);
  for (int64_t device = 0; device < device_count(); device++) pool(device).limit = limit;
  perturbs = perturb;
}
void set_rates(double launch, double bandwidth, double flops, double half_flops, double link, double latency, double pageable) {
  Lock lock(engine().mutex);
  engine().rates = {launch, bandwidth, flops, half_flops, link, latency, pageable};
}
std::vector<std::string> races() {
  Lock lock(engine().mutex);
  engine().host_waits_for_all(lock);
  auto all = engine().races.found;
  if (engine().races.count > all.size()) all.push_back("... and " + std::to_string(engine().races.count - all.size()) + " more");
  return all;
}
std::vector<int64_t> counts() {
  Lock lock(engine().mutex);
  const Counts& of = engine().counts;
  const std::vector<uint64_t> all{of.host_waits, of.pageable_in, of.pageable_out, of.pinned_in, of.pinned_out};
  return {all.begin(), all.end()};
}
c10::Dict<std::string, int64_t> kernels(int64_t device) {
  Lock lock(engine().mutex);
  c10::Dict<std::string, int64_t> all;
  for (const auto& [name, count] : engine().counts.kernels[device]) all.insert(name, count);
  return all;
}
// Counts operators on tensors of the host. Those that run as kernels of a device do not count, nor do views.
std::unique_ptr<at::ObserverContext> count_on_host(const at::RecordFunction& call) {
  if (below || !call.operator_name()) return nullptr;
  const auto op = c10::Dispatcher::singleton().findOp(*call.operator_name());
  if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) return nullptr;
  for (const auto& result : op->schema().returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return nullptr;
  const auto inputs = call.inputs();
  const auto has = [&](auto where) {
    return std::any_of(inputs.begin(), inputs.end(), [&](const c10::IValue& value) {
      if (value.isTensor()) return value.toTensor().defined() && where(value.toTensor());
      return value.isTensorList() && !value.toTensorVector().empty() && where(value.toTensorVector()[0]);
    });
  };
  if (!has([](const at::Tensor& tensor) { return tensor.is_cpu(); }) || has(on_device)) return nullptr;
  Lock lock(engine().mutex);
  engine().counts.kernels[-1][call.operator_name()->name]++;
  return nullptr;
}
void watch_host(bool on) {
  static std::optional<at::CallbackHandle> handle;
  if (handle) at::removeCallback(*handle);
  handle.reset();
  if (on) handle = at::addGlobalCallback(at::RecordFunctionCallback(count_on_host).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}
std::vector<double> virtual_seconds(int64_t device) {
  Lock lock(engine().mutex);
  auto& busy = engine().busy;
  return {engine().makespan(), engine().host_time, busy[{device, kCompute}], busy[{device, kCopyIn}], busy[{device, kCopyOut}]};
}
void pin(const at::Tensor& tensor) {
  Lock lock(engine().mutex);
  pinned().add(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
}
void unpin(const at::Tensor& tensor) {
  Lock lock(engine().mutex);
  pinned().remove(lock, static_cast<const char*>(tensor.const_data_ptr()));
}
int64_t new_gate() {
  Lock lock(engine().mutex);
  return engine().new_gate();
}
void open_gate(int64_t gate) {
  Lock lock(engine().mutex);
  engine().open_gate(gate);
}
at::Tensor random_state(int64_t device) { return default_generator(device).get_state(); }
void set_random_state(int64_t device, const at::Tensor& state) { at::Generator(default_generator(device)).set_state(state); }
void seed(int64_t device, int64_t value) { at::Generator(default_generator(device)).set_current_seed(value); }
int64_t initial_seed(int64_t device) { return static_cast<int64_t>(default_generator(device).current_seed()); }

bool is_composite(const c10::OperatorHandle& op) {
  using Key = c10::DispatchKey;
  return op.hasKernelForDispatchKey(Key::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(Key::CompositeExplicitAutogradNonFunctional);
}

TORCH_LIBRARY(sim, m) {
  m.def("configure(int schedule, int seed, int limit, bool perturb) -> ()", configure);
  m.def("set_rates", set_rates);
  m.def("races() -> str[]", races);
  m.def("counts() -> int[]", counts);
  m.def("kernels(int device) -> Dict(str, int)", kernels);
  m.def("watch_host(bool on) -> ()", watch_host);
  m.def("virtual_seconds(int device) -> float[]", virtual_seconds);
  m.def("new_gate() -> int", new_gate);
  m.def("open_gate(int gate) -> ()", open_gate);
  m.def("random_state(int device) -> Tensor", random_state);
  m.def("set_random_state(int device, Tensor state) -> ()");
  m.def("seed(int device, int value) -> ()", seed);
  m.def("initial_seed(int device) -> int", initial_seed);
  m.def("pin(Tensor memory) -> ()");
  m.def("unpin(Tensor memory) -> ()");
  m.def("deliver(Tensor source, Tensor(a!) target, int gate) -> ()");
}
TORCH_LIBRARY_IMPL(sim, CPU, m) {
  m.impl("set_random_state", set_random_state);
  m.impl("pin", pin);
  m.impl("unpin", unpin);
}
TORCH_LIBRARY_IMPL(sim, PrivateUse1, m) { m.impl("deliver", deliver); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", alias);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", takes_data_of);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  for (const char* name : {"convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
  // What the CPU has a kernel of its own for goes whole, even where PyTorch knows how to take it apart: else bits differ.
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) == 0 && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) && name.name != "aten::_efficientzerotensor" && is_composite(*op))
      m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
  }
}

// The question whether `self.data = other` may be written reads neither, as on other devices: a negated view stays one.
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_has_compatible_shallow_copy_type", torch::CppFunction::makeFallthrough()); }

#define NAME(...) operator_name(#__VA_ARGS__),
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  const auto all = [&](std::initializer_list<std::string> names, auto kernel) {
    for (const auto& name : names) m.impl(name.c_str(), kernel());
  };
  all({AT_FORALL_LOWER_PRECISION_FP(NAME)}, [] { return torch::CppFunction::makeFromBoxedFunction<&autocast<Cast::kLower>>(); });
  all({AT_FORALL_FP32(NAME) AT_FORALL_FP32_SET_OPT_DTYPE(NAME)},
      [] { return torch::CppFunction::makeFromBoxedFunction<&autocast<Cast::kFloat>>(); });
  all({AT_FORALL_PROMOTE(NAME)}, [] { return torch::CppFunction::makeFromBoxedFunction<&autocast<Cast::kWidest>>(); });
}

}  // namespace
}  // namespace sim
