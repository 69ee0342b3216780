#pragma once

// What an optimizer does with a parameter or gradient: it works on this rank's part.

#include "dtensor/tensor_impl.h"

#include <map>
#include <tuple>
#include <vector>

namespace fsdp2::optim {

inline const torch::Tensor& part_of(const torch::Tensor& tensor) {
  return is_dtensor(tensor) ? local_part(tensor) : tensor;
}

/// The same, to be written: whoever holds gathered bytes of it is told.
inline const torch::Tensor& written_part_of(const torch::Tensor& tensor) {
  if (is_dtensor(tensor)) dtensor::announce_write(tensor);
  return part_of(tensor);
}

/// Tensors that one kernel over a list can take together.
using Kind = std::tuple<c10::DeviceType, c10::DeviceIndex, c10::ScalarType>;
inline Kind kind_of(const torch::Tensor& tensor) {
  return {tensor.device().type(), tensor.device().index(), tensor.scalar_type()};
}
using Lists = std::map<Kind, std::vector<torch::Tensor>>;

}  // namespace fsdp2::optim
