#pragma once

// What this library's own backends ask of the tensors that a collective is given. Errors name the
// backend, the collective and its group.

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/types.h>

#include <string>
#include <utility>
#include <vector>

namespace fsdp2::comm {

class BackendChecks {
 public:
  BackendChecks(const char* backend, std::string group)
      : backend_(backend), group_(std::move(group)) {}

  /// On the CPU, dense and contiguous.
  void tensor(const at::Tensor& tensor, const char* name) const;
  void one_tensor(const std::vector<at::Tensor>& tensors, const char* name) const;
  void same_type(const at::Tensor& a, const at::Tensor& b, const char* name) const;
  void reduction(const at::Tensor& tensor, const c10d::ReduceOp& op) const;

 private:
  const char* const backend_;
  const std::string group_;
};

}  // namespace fsdp2::comm
