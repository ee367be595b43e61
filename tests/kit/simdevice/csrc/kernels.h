// Operators: the CPU's kernels, on the pages behind the device's addresses, when their stream gets to them.
//
// Every operator without a function of its own comes to `run`. A trial on zeros, at once, tells which tensors come out of it and of
// which shapes; the real thing is queued. What cannot wait (the shape depends on values, the result is a number) is not tried but
// run at once on real values, after a wait: as on real accelerators.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/InferSize.h>
#include <ATen/Parallel.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/op_registration/op_registration.h>
#include <c10/core/DeviceGuard.h>

#include "device.h"

namespace sim {

inline bool perturbs = false;  // this device's square roots are off by one ulp, and so are its fused updates

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// What comes above the device is done: no autograd, no autocast, no modes of Python.
inline thread_local int below = 0;
struct Below {
  Below() {
    thread_local const bool single = (at::set_num_threads(1), true);  // sums are the same on whichever thread a task runs
    below += single;
  }
  ~Below() { below--; }
  Below(const Below&) = delete;
  c10::impl::ExcludeDispatchKeyGuard keys{
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

// A tensor as a task sees it: where it is. It keeps no memory alive, as no kernel does.
struct View {
  char* data = nullptr;  // as kernels see it
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  size_t bytes, span;  // of the elements; from the first to the last one
  bool negative, conjugate;

  explicit View(const at::Tensor& tensor)
      : sizes(tensor.sizes().vec()), strides(tensor.strides().vec()), dtype(tensor.scalar_type()), bytes(tensor.nbytes()),
        negative(tensor.is_neg()), conjugate(tensor.is_conj()) {
    size_t last = 0;
    for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
    span = tensor.numel() ? (last + 1) * tensor.element_size() : 0;
    if (!span) return;
    data = static_cast<char*>(tensor.storage().data_ptr().get()) + tensor.storage_offset() * tensor.element_size();
    if (on_device(tensor)) data = pages().opened(data);
  }
  at::Tensor tensor() const {
    const auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
    auto tensor = data ? at::from_blob(data, sizes, strides, options) : at::empty_strided(sizes, strides, options);
    tensor._set_neg(negative);
    tensor._set_conj(conjugate);
    return tensor;
  }
  Access access(bool writes) const { return {{data, data + span}, writes}; }
};

// ---- tensors without kernels --------------------------------------------------------------------------------------

inline at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(sizes, strides, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
inline at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(sizes, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
inline at::Tensor alias(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                        std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(),
                                                       self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset.value_or(self.storage_offset()));
  return view;
}
inline at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return alias(self, sizes, strides, {});
}
inline at::Tensor view(const at::Tensor& self, at::IntArrayRef sizes) {
  const auto inferred = at::infer_size_dv(sizes, self.numel());
  const auto strides = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(strides.has_value(), "view size is not compatible with input tensor's size and stride (at least one dimension ",
              "spans across two contiguous subspaces). Use .reshape(...) instead.");
  return alias(self, inferred, *strides, {});
}
inline const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  const size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, self.element_size(), self.storage_offset());
  if (bytes > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}
inline at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes,
                               at::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  if (strides.empty())
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  else
    self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  return self;
}
inline at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / self.element_size());
  return set_storage(self, std::move(storage), 0, elements, {});
}
inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) {
  return set_storage(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}
// Whether `self.data = other` may be written: as of CUDA, also between the host and the device.
inline bool takes_data_of(const at::Tensor& self, const at::Tensor& other) {
  const auto dense = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && !tensor.unsafeGetTensorImpl()->is_python_dispatch() && (tensor.is_cpu() || on_device(tensor));
  };
  return dense(self) && dense(other);
}
inline void record_stream(at::Tensor& self, at::Stream stream) { allocator().recordStream(self.storage().data_ptr(), stream); }

// ---- copies -------------------------------------------------------------------------------------------------------

inline bool dense_alike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  const at::Tensor source = self.expand(target.sizes());
  const bool in = !on_device(source), out = !on_device(target);
  const at::Tensor& host = in ? source : target;
  const bool reached = (in || out) && dense_alike(source, target) && Hooks().isPinnedPtr(host.const_data_ptr());
  const at::Tensor kept = in && !reached ? source.clone() : at::Tensor();  // pageable memory is read before the call is over
  const c10::DeviceGuard guard((in ? target : source).device());
  const StreamId stream = current_stream();
  const View from(kept.defined() ? kept : source), to(target);

  std::vector<Access> accesses;
  if (!in || reached) accesses.push_back(from.access(false));
  if (!out || reached) accesses.push_back(to.access(true));
  Lock lock(engine().mutex);
  Counts& counts = engine().counts;
  if (in) (reached ? counts.pinned_in : counts.pageable_in) += to.bytes;
  if (out) (reached ? counts.pinned_out : counts.pageable_out) += to.bytes;
  const Rates& rates = engine().rates;
  const bool pageable = (in || out) && !reached;
  const Cost cost = in || out ? Cost{rates.latency + to.bytes / (pageable ? rates.pageable : rates.link),
                                     in ? kCopyIn : kCopyOut, pageable}
                              : Cost{2 * to.bytes / rates.bandwidth};

  const bool across = !in && !out && source.device() != target.device();
  const StreamId other = current_stream(target.device().index());
  if (across) engine().wait(lock, stream, engine().moment(other));
  if (out && reached) engine().races.written_by_device(to.access(true));
  std::string name = in ? "copy to the device" : out ? "copy to the host" : "copy";
  engine().push(lock, stream, {name, [from, to, kept] { Below below; to.tensor().copy_(from.tensor()); }}, accesses, cost);
  if (in && reached) engine().races.watch(engine().last(stream, name), from.access(false));
  if (across) engine().wait(lock, other, engine().moment(stream));
  if ((in || out) && (!non_blocking || (out && !reached))) engine().host_waits(lock, engine().moment(stream));
  lock.unlock();  // a new reference to a tensor may need Python's lock, whose owner may be waiting for this one
  return target;
}
inline at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}
inline at::Scalar local_scalar(const at::Tensor& self) {
  const at::Tensor host = at::empty_strided(self.sizes(), self.strides(), self.options().device(at::kCPU));
  copy_from(self, host, false);
  return host.item();
}
// For collectives: a copy to the device that runs when the host has opened `gate`. Until then the host writes to `source`.
inline void deliver(const at::Tensor& source, const at::Tensor& target, int64_t gate) {
  const c10::DeviceGuard guard(target.device());
  const View from(source), to(target);
  Lock lock(engine().mutex);
  const Cost cost{to.bytes / engine().rates.link, kCopyIn};
  Task task{"a collective's result", [from, to] { Below below; to.tensor().copy_(from.tensor()); }, {}, gate};
  engine().push(lock, current_stream(), std::move(task), {to.access(true)}, cost);
}

// ---- everything else ----------------------------------------------------------------------------------------------

// An argument of a call: a value, or where its tensors are among the call's operands (-1: none there).
struct Argument {
  enum Kind { kValue, kTensor, kTensors, kOptionalTensors, kGenerator } kind = kValue;
  c10::IValue value;
  std::vector<int> at;

  c10::IValue with(const std::vector<at::Tensor>& tensors, const at::Generator& generator) const {
    const auto get = [&](int index) { return index < 0 ? at::Tensor() : tensors[index]; };
    switch (kind) {
      case kValue: return value;
      case kGenerator: return generator;
      case kTensor: return get(at[0]);
      case kTensors: {
        c10::List<at::Tensor> list;
        for (int index : at) list.push_back(get(index));
        return list;
      }
      case kOptionalTensors: break;
    }
    c10::List<std::optional<at::Tensor>> list;
    for (int index : at) list.push_back(index < 0 ? std::nullopt : std::optional(tensors[index]));
    return list;
  }
};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), name_(op.schema().operator_name().name), stack_(stack) {
    if (!op.schema().overload_name().empty()) name_ += "." + op.schema().overload_name();
    TORCH_CHECK(name_ != "aten::native_dropout", "sim: native_dropout is not simulated; torch.dropout is");
    read_arguments();
  }

  void run() {
    const c10::DeviceGuard guard(device_.value_or(c10::Device(kSim, static_cast<c10::DeviceIndex>(current_device))));
    const StreamId stream = current_stream();
    if (!generator_.defined()) generator_ = default_generator(current_device);
    at::Generator& generator = static_cast<Generator*>(generator_.unsafeGetGeneratorImpl())->cpu;
    const at::Generator before = draws_ ? generator.clone() : at::Generator();
    bool now = needs_values();
    if (!now) try {
        stand_in([](const at::Tensor& real) {
          return at::empty_strided(real.sizes(), real.strides(), real.options().device(at::kCPU)).zero_();
        });
        results_ = call(op_, arguments_, stand_ins_, generator);
      } catch (const std::exception&) {  // of an operator that cannot be tried on zeros, or of a wrong call, which raises again
        now = true;
        if (draws_) generator.unsafeGetGeneratorImpl()->set_state(*before.unsafeGetGeneratorImpl()->get_state());
      }
    if (now) {
      Lock lock(engine().mutex);
      engine().push(lock, stream, {name_, [] {}}, accesses(), cost());
      engine().host_waits(lock, engine().moment(stream));
      lock.unlock();
      stand_in([](const at::Tensor& real) { return View(real).tensor(); });
      results_ = call(op_, arguments_, stand_ins_, generator);
    }
    give_results(now);
    resize_written(now);
    if (!now) queue(stream, before);
  }

 private:
  struct Operand {
    at::Tensor tensor;
    bool writes;
  };
  struct Output {  // position among the results, position in that list or -1, where it goes
    size_t result;
    int element;
    View target;
  };
  const c10::OperatorHandle& op_;
  std::string name_;
  torch::jit::Stack* stack_;
  std::vector<Operand> operands_;
  std::vector<Argument> arguments_;
  std::optional<c10::Device> device_;
  at::Generator generator_;
  bool draws_ = false, masked_ = false;
  std::vector<at::Tensor> stand_ins_;  // by operand: zeros, or in a run at once the real memory
  torch::jit::Stack results_;
  std::vector<Output> outputs_;

  bool starts_with(const char* prefix) const { return name_.rfind(prefix, 0) == 0; }
  bool indexes() const { return starts_with("aten::index.") || starts_with("aten::index_put") || starts_with("aten::_index_put"); }

  void read_arguments() {
    const auto& formal = op_.schema().arguments();
    for (size_t i = 0; i < formal.size(); i++) {
      const c10::IValue& value = torch::jit::peek(*stack_, i, formal.size());
      const bool writes = formal[i].alias_info() && formal[i].alias_info()->isWrite();
      Argument argument;
      if (value.isTensor()) {
        argument.kind = Argument::kTensor;
        argument.at.push_back(operand(value.toTensor(), writes));
      } else if (value.isTensorList()) {
        argument.kind = Argument::kTensors;
        for (const at::Tensor& tensor : value.toTensorVector()) argument.at.push_back(operand(tensor, writes));
      } else if (value.isOptionalTensorList()) {
        argument.kind = Argument::kOptionalTensors;
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList().vec())
          argument.at.push_back(operand(tensor.value_or(at::Tensor()), writes));
      } else if (formal[i].type()->str().find("Generator") != std::string::npos) {
        argument.kind = Argument::kGenerator;
        draws_ = true;
        if (value.isGenerator()) generator_ = value.toGenerator();
        TORCH_CHECK(!generator_.defined() || generator_.device().type() == kSim, "Expected a 'sim' device type for generator but ",
                    "found '", generator_.device(), "'");
      } else if (value.isDevice()) {
        if (value.toDevice().type() == kSim) device_ = value.toDevice();
        argument.value = c10::Device(at::kCPU);
      } else {
        argument.value = value;
      }
      arguments_.push_back(std::move(argument));
    }
    for (const auto& [tensor, writes] : operands_)
      TORCH_CHECK(!device_ || on_device(tensor) || (!writes && (tensor.dim() == 0 || indexes())), name_,
                  ": Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and cpu!");
  }
  int operand(const at::Tensor& tensor, bool writes) {
    if (!tensor.defined()) return -1;
    masked_ |= indexes() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte) && operands_.size() > 0;
    if (on_device(tensor)) {
      TORCH_CHECK(!device_ || !device_->has_index() || *device_ == tensor.device(), name_,
                  ": Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ",
                  tensor.device(), "!");
      device_ = tensor.device();
    }
    for (size_t i = 0; i < operands_.size(); i++)
      if (operands_[i].tensor.is_same(tensor)) return operands_[i].writes |= writes, static_cast<int>(i);
    operands_.push_back({tensor, writes});
    return static_cast<int>(operands_.size()) - 1;
  }

  bool needs_values() const {
    if (indexes()) return masked_;
    for (const auto& result : op_.schema().returns()) {
      const auto kind = result.type()->kind();
      if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return true;
    }
    return op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape);
  }

  template <class Make>
  void stand_in(Make make) {
    const Below below;
    stand_ins_.clear();
    for (const auto& [tensor, writes] : operands_) {
      stand_ins_.push_back(on_device(tensor) ? make(tensor) : tensor.clone());
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) stand_ins_.back().unsafeGetTensorImpl()->set_wrapped_number(true);
    }
  }
  static torch::jit::Stack call(const c10::OperatorHandle& op, const std::vector<Argument>& arguments,
                                const std::vector<at::Tensor>& tensors, const at::Generator& generator) {
    const Below below;
    torch::jit::Stack stack;
    for (const auto& argument : arguments) stack.push_back(argument.with(tensors, generator));
    op.callBoxed(&stack);
    return stack;
  }

  void give_results(bool now) {
    torch::jit::drop(*stack_, op_.schema().arguments().size());
    for (size_t r = 0; r < results_.size(); r++) {
      const c10::IValue& value = results_[r];
      if (value.isTensor()) {
        torch::jit::push(*stack_, result(value.toTensor(), {r, -1}, now));
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : value.toTensorVector())
          list.push_back(result(tensor, {r, static_cast<int>(list.size())}, now));
        torch::jit::push(*stack_, c10::IValue(list));
      } else {
        torch::jit::push(*stack_, value);
      }
    }
  }
  // The device's tensor for a tensor that came out: an operand itself, a view of one, or a new one.
  at::Tensor result(const at::Tensor& tensor, std::pair<size_t, int> position, bool now) {
    if (!tensor.defined()) return tensor;
    for (size_t i = 0; i < operands_.size(); i++) {
      if (!on_device(operands_[i].tensor)) continue;
      if (stand_ins_[i].is_same(tensor)) return operands_[i].tensor;
      if (tensor.numel() && stand_ins_[i].storage().data() == tensor.storage().data())
        return alias(operands_[i].tensor, tensor.sizes(), tensor.strides(),
                          operands_[i].tensor.storage_offset() + tensor.storage_offset());
    }
    const c10::Device device(kSim, static_cast<c10::DeviceIndex>(current_device));
    const at::Tensor made = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, device, {});
    const View target(made);
    const Below below;
    if (now)
      target.tensor().copy_(tensor);
    else
      outputs_.push_back({position.first, position.second, target});
    return made;
  }
  void resize_written(bool now) {  // out= of another size
    for (size_t i = 0; i < operands_.size(); i++) {
      const auto& [tensor, writes] = operands_[i];
      if (!writes || tensor.sizes() == stand_ins_[i].sizes()) continue;
      tensor.resize_(stand_ins_[i].sizes());
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(stand_ins_[i].sizes(), stand_ins_[i].strides());
      const Below below;
      if (now) View(tensor).tensor().copy_(stand_ins_[i]);
    }
  }

  void queue(StreamId stream, const at::Generator& generator) {
    std::vector<std::optional<View>> views;  // of the device's operands; the host's are kept as they are now
    std::vector<at::Tensor> kept;
    bool writes = !outputs_.empty();
    for (size_t i = 0; i < operands_.size(); i++) {
      const bool here = on_device(operands_[i].tensor);
      views.push_back(here ? std::optional<View>(operands_[i].tensor) : std::nullopt);
      kept.push_back(here ? at::Tensor() : stand_ins_[i]);
      writes |= operands_[i].writes;
    }
    if (!writes) return;  // a view
    auto task = [op = op_, arguments = arguments_, views, kept, outputs = outputs_, generator, nudged = nudged(),
                 grad = at::GradMode::is_enabled()] {
      const Below below;
      const at::AutoGradMode as_when_queued(grad);  // what some kernels return depends on it
      std::vector<at::Tensor> tensors = kept;
      for (size_t i = 0; i < views.size(); i++)
        if (views[i]) tensors[i] = views[i]->tensor();
      const torch::jit::Stack results = call(op, arguments, tensors, generator);
      for (const auto& [result, element, target] : outputs)
        target.tensor().copy_(element < 0 ? results[result].toTensor() : results[result].toTensorVector()[element]);
      if (!nudged) return;
      for (const auto& output : outputs) nudge(output.target.tensor());
      for (int index : *nudged) nudge(tensors[index]);
    };
    Lock lock(engine().mutex);
    engine().push(lock, stream, {name_, std::move(task)}, accesses(), cost());
  }
  std::vector<Access> accesses() const {
    std::vector<Access> all;
    for (const auto& [tensor, writes] : operands_)
      if (on_device(tensor)) all.push_back(View(tensor).access(writes));
    for (const auto& output : outputs_) all.push_back(output.target.access(true));
    return all;
  }

  // The operands that a perturbed device leaves one ulp too large, besides the outputs.
  std::optional<std::vector<int>> nudged() const {
    const bool root = name_.find("sqrt") != std::string::npos, fused = starts_with("aten::_fused_");
    if (!perturbs || !(root || fused)) return {};
    if (op_.schema().arguments()[0].alias_info()) return arguments_[0].at;
    return std::vector<int>();
  }
  static void nudge(const at::Tensor& tensor) {
    if (tensor.is_floating_point()) tensor.copy_(at::nextafter(tensor, at::full({}, INFINITY, tensor.options())));
  }

  Cost cost() const {
    const Rates& rates = engine().rates;
    double bytes = 0, operations = 0;
    for (const auto& [tensor, writes] : operands_) bytes += tensor.nbytes();
    for (const auto& output : outputs_) bytes += output.target.bytes;
    bool half = false;
    for (const auto& [tensor, writes] : operands_) half |= tensor.element_size() == 2;
    const auto size = [&](size_t index) { return double(operands_[index].tensor.numel()); };
    const auto last = operands_.size() - 1;
    if ((starts_with("aten::mm") || starts_with("aten::addmm") || starts_with("aten::bmm") || starts_with("aten::baddbmm")) &&
        operands_.size() >= 2)
      operations = 2 * size(last - 1) * operands_[last].tensor.size(-1);
    else if (starts_with("aten::convolution") && !outputs_.empty() && operands_.size() >= 2) {
      const bool backward = starts_with("aten::convolution_backward");  // grad_output, input, weight; else input, weight
      const auto& weight = operands_[backward ? 2 : 1].tensor;
      const double made = backward ? 2 * size(0) : outputs_[0].target.bytes / double(weight.element_size());
      operations = 2 * made * weight.numel() / weight.size(0);
    }
    return {std::max(bytes / rates.bandwidth, operations / (half ? rates.half_flops : rates.flops))};
  }
};

inline void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

}  // namespace sim
