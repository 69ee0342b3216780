#include "fsdp/gathered_storage.h"

#include <c10/core/Allocator.h>

#include <typeinfo>

namespace fsdp2::fsdp {
namespace {

/// Takes over what sizes and strides imply instead of working it out again.
class Alias final : public c10::TensorImpl {
 public:
  Alias(const c10::TensorImpl& of, c10::DispatchKeySet keys)
      : c10::TensorImpl(VIEW, c10::Storage(of.storage()), keys, of.dtype()) {
    copy_tensor_metadata(&of, this, version_counter(), /*allow_tensor_metadata_change=*/true);
    key_set_ = keys;
  }
};

}  // namespace

GatheredStorage::GatheredStorage(std::shared_ptr<ParamGroup> group, size_t index,
                                 const std::string& name, int64_t nbytes, c10::Device device)
    : c10::StorageImpl(use_byte_size_t(), c10::SymInt(nbytes), c10::DataPtr(nullptr, device),
                       c10::GetAllocator(device.type()), /*resizable=*/true),
      group_(std::move(group)),
      index_(index),
      name_(name),
      device_(device) {
  drop();
}

void GatheredStorage::fill(c10::DataPtr bytes) {
  empty_ = false;
  clear_data_ptr_access_error_msg_();
  set_data_ptr_noswap(std::move(bytes));
}

void GatheredStorage::drop() {
  empty_ = true;
  set_data_ptr_noswap(c10::DataPtr(nullptr, device_));
  release_data_and_set_meta_custom_data_ptr_error_msg_(
      "parameter '" + name_ +
      "' is sharded: its data is here only while its module is unsharded. Use it in an op, or take "
      "fsdp2::as_fsdp(module).unshard() around direct access to its data.");
}

void GatheredStorage::rename(const std::string& name) {
  name_ = name;
  if (empty_) drop();
}

void GatheredStorage::release_resources() {
  c10::StorageImpl::release_resources();
  group_.reset();
}

GatheredStorage* gathered_storage(const torch::Tensor& tensor) {
  if (!is_gathered(tensor) || !tensor.has_storage()) return nullptr;
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  // The class is final: this is dynamic_cast, at a fraction of its cost for each argument of an op.
  return typeid(*storage) == typeid(GatheredStorage) ? static_cast<GatheredStorage*>(storage)
                                                     : nullptr;
}

torch::Tensor with_keys(const torch::Tensor& tensor, c10::DispatchKeySet keys) {
  return at::detail::make_tensor<Alias>(*tensor.unsafeGetTensorImpl(), keys);
}

}  // namespace fsdp2::fsdp
