#pragma once

// The storage of a parameter that gathers itself: full size, but with bytes only while its group is
// unsharded.

#include <c10/core/StorageImpl.h>
#include <torch/types.h>

#include <memory>
#include <string>

namespace fsdp2::fsdp {

class ParamGroup;

/// The backend bit that tensors on such a storage carry, and that brings every op on them to us.
constexpr c10::BackendComponent kGatheredBit = c10::BackendComponent::PrivateUse3Bit;

/// Owns its group (so that a graph which outlives the module can still gather); the group knows it
/// weakly.
class GatheredStorage final : public c10::StorageImpl {
 public:
  GatheredStorage(std::shared_ptr<ParamGroup> group, size_t index, const std::string& name,
                  int64_t nbytes, c10::Device device);

  /// Gives it bytes. Version counters stay: saved views see the same values again.
  void fill(c10::DataPtr bytes);
  /// Takes them away; direct access to data is then an error that names the parameter.
  void drop();

  /// What errors call the parameter.
  void rename(const std::string& name);

  const std::shared_ptr<ParamGroup>& group() const { return group_; }
  size_t index() const { return index_; }

  /// The last strong reference is gone: the group's weak one must not keep the group.
  void release_resources() override;

 private:
  std::shared_ptr<ParamGroup> group_;
  size_t index_;
  std::string name_;
  bool empty_ = true;
  c10::Device device_;
};

/// The bit, and what has it seen where a tensor is on the meta device, whose own bit takes
/// precedence over all others: keys that libtorch leaves to others, below and above autograd.
inline c10::DispatchKeySet gathered_keys(c10::Device device) {
  const c10::DispatchKeySet keys(kGatheredBit);
  if (!device.is_meta()) return keys;
  return keys | c10::DispatchKeySet{c10::DispatchKey::Fake, c10::DispatchKey::DeferredInit};
}
inline c10::DispatchKeySet without_gathered_keys(c10::DispatchKeySet keys) {
  return keys.remove_backend(kGatheredBit)
      .remove(c10::DispatchKey::Fake)
      .remove(c10::DispatchKey::DeferredInit);
}

inline bool is_gathered(const torch::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has_backend(kGatheredBit);
}

/// The storage behind a tensor with the bit, or null if the tensor has none (its storage was
/// replaced).
GatheredStorage* gathered_storage(const torch::Tensor& tensor);

/// The same view of the same bytes with another key set.
torch::Tensor with_keys(const torch::Tensor& tensor, c10::DispatchKeySet keys);

}  // namespace fsdp2::fsdp
