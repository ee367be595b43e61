// Autocast by PyTorch's own lists, in boxed form.
#pragma once
#include <ATen/autocast_mode.h>

#include "kernels.h"

namespace sim {

enum class Cast { kLower, kFloat, kWidest };

inline at::ScalarType widest(const torch::jit::Stack& stack, size_t count) {
  auto type = at::autocast::get_autocast_dtype(kSim);
  for (size_t i = 0; i < count; i++) {
    const c10::IValue& value = torch::jit::peek(stack, i, count);
    if (value.isTensor() && value.toTensor().defined()) type = at::autocast::prioritize(type, value.toTensor(), kSim);
    if (value.isTensorList()) type = at::autocast::prioritize(type, value.toTensorVector(), kSim);
  }
  return type;
}

template <Cast cast>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const size_t count = op.schema().arguments().size();
  const auto type = cast == Cast::kLower   ? at::autocast::get_autocast_dtype(kSim)
                    : cast == Cast::kFloat ? at::kFloat
                                           : widest(*stack, count);
  for (size_t i = 0; i < count; i++) {
    c10::IValue& value = torch::jit::peek(*stack, i, count);
    if (value.isTensor() && value.toTensor().defined())
      value = at::autocast::cached_cast(type, value.toTensor(), kSim);
    else if (value.isTensorList())
      value = c10::List<at::Tensor>(at::autocast::cached_cast(type, value.toTensorVector(), kSim));
  }
  op.callBoxed(stack);
}

inline std::string operator_name(std::string listed) {  // "pow, Scalar" -> "pow.Scalar"
  if (const auto comma = listed.find(", "); comma != std::string::npos) listed.replace(comma, 2, ".");
  return listed;
}

}  // namespace sim
