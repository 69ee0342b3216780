#include "dtensor/tensor_impl.h"

#include "dispatch/replace_data.h"
#include "dtensor/mirror.h"
#include "dtensor/redistribute.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace fsdp2 {
namespace dtensor {
namespace {

constexpr const char* kNoData =
    "the data of a DTensor lies in parts over its mesh: take to_local() or full_tensor(); to save "
    "it, save full_tensor(); to print it, use DTensor::to_string()";

}  // namespace

DTensorImpl::DTensorImpl(at::Tensor local, SpecPtr spec, c10::IntArrayRef sizes)
    : c10::TensorImpl(c10::DispatchKeySet(c10::DispatchKey::PrivateUse2), local.dtype(),
                      local.device()),
      local(std::move(local)),
      spec(std::move(spec)),
      writes(std::make_shared<std::atomic<int64_t>>(0)) {
  if (this->local.is_contiguous()) {
    set_sizes_contiguous(sizes);
  } else {
    set_sizes_and_strides(sizes, strides_like(sizes, this->local));
  }
  release_storage_and_set_meta_custom_data_ptr_error_msg_(kNoData);
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(
    const c10::VariableVersion& version, bool allow_change) const {
  return shallow_copy_and_detach(c10::VariableVersion(version), allow_change);
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(
    c10::VariableVersion&& version, bool allow_change) const {
  auto copy = c10::make_intrusive<DTensorImpl>(local, spec, sizes());
  copy->set_sizes_and_strides(sizes(), strides());
  copy->observer = observer;
  copy->finished = finished;
  copy->mirror = mirror;
  copy->writes = writes;
  if (!copy->is_inference()) copy->set_version_counter(std::move(version));
  copy->set_allow_tensor_metadata_change(allow_change);
  return copy;
}

void DTensorImpl::shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& source) {
  const at::Tensor given(source);
  const bool plain = !is_dtensor(given);
  if (plain || !same(impl_of(given)->spec, spec)) {
    // Whole values: each rank takes its part.
    TORCH_CHECK(given.sizes() == sizes() && !spec->partial && given.device() == local.device() &&
                    (plain || spec_of(given)->mesh == spec->mesh),
                "set_data on a DTensor of size ", sizes(), " laid out as ",
                to_string(spec->placements), " on ", local.device(), " from a ",
                plain ? "plain tensor" : "DTensor", " of size ", given.sizes(), " on ",
                given.device(), ": give the whole values, or copy_() them into it");
    const at::Tensor part =
        plain ? part_of(given, *spec).clone(at::MemoryFormat::Contiguous)
              : redistribute_local(local_of(given), sizes(), *spec_of(given), *spec).clone();
    return shallow_copy_from(wrap(part, spec, sizes()).getIntrusivePtr());
  }
  const auto* other = static_cast<const DTensorImpl*>(source.get());
  if (!observer.expired() && !local.is_same(other->local)) {
    // Others hold this very local part: its bytes may change, it may not be replaced.
    TORCH_CHECK(other->local.dtype() == local.dtype() && other->local.device() == local.device() &&
                    other->sizes() == sizes(),
                "set_data on a parameter that fully_shard manages: it is ", local.dtype(), " on ",
                local.device(), " of size ", sizes(), " and cannot become ", other->local.dtype(),
                " on ", other->local.device(), " of size ", other->sizes(),
                ". Convert or move the module before fully_shard");
    if (!local.is_alias_of(other->local)) {
      if (auto held = observer.lock()) held->before_write();
      ++*writes;
      at::AutoDispatchBelowADInplaceOrView guard;
      local.copy_(other->local);
    }
    return;
  }
  local = other->local;
  spec = other->spec;
  finished = other->finished;
  mirror = other->mirror;
  writes = other->writes;
  copy_tensor_metadata(other, this, version_counter(), allow_tensor_metadata_change());
}

const char* DTensorImpl::tensorimpl_type_name() const { return "DTensor"; }

void DTensorImpl::give_memory(const at::TensorOptions& options) {
  // The tensor stays: aliases hold it too.
  dispatch::replace_data(local, at::empty(local.sizes(), options.dtype(local.dtype())));
  device_opt_ = local.device();
}

void bump_version_of(const at::Tensor& local) {
  if (!local.is_inference()) torch::autograd::impl::bump_version(local);
}

void share_version(const at::Tensor& alias, const at::Tensor& local) {
  using namespace torch::autograd::impl;
  if (!alias.is_inference() && !local.is_inference())
    set_version_counter(alias, version_counter(local));
}

at::Tensor wrap(at::Tensor local, SpecPtr spec, c10::IntArrayRef sizes) {
  const bool partial = spec->partial;
  auto impl = c10::make_intrusive<DTensorImpl>(std::move(local), std::move(spec), sizes);
  if (partial) impl->finished = std::make_shared<Finished>();
  return at::Tensor(std::move(impl));
}

at::Tensor wrap_alias(at::Tensor local, SpecPtr spec, c10::IntArrayRef sizes,
                      const at::Tensor& source) {
  // Writes to local parts are seen by their version, whichever alias they go through.
  if (!local.is_same(local_of(source))) share_version(local, local_of(source));
  auto impl = c10::make_intrusive<DTensorImpl>(std::move(local), std::move(spec), sizes);
  impl->observer = impl_of(source)->observer;
  impl->mirror = impl_of(source)->mirror;
  impl->writes = impl_of(source)->writes;
  if (impl->spec->partial) {
    const bool whole = sizes == source.sizes() && impl->spec == spec_of(source);
    impl->finished = whole ? impl_of(source)->finished : std::make_shared<Finished>();
  }
  return at::Tensor(std::move(impl));
}

void announce_write(const at::Tensor& tensor) {
  DTensorImpl* impl = impl_of(tensor);
  if (impl->mirror) check_writable(*impl->mirror);
  // DTensors that were made around the same local part know nothing of each other.
  bump_version_of(impl->local);
  if (auto observer = impl->observer.lock()) observer->before_write();
  ++*impl->writes;
  if (impl->finished) impl->finished->value.reset();
}

}  // namespace dtensor

bool is_dtensor(const torch::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has_backend(c10::BackendComponent::PrivateUse2Bit);
}

torch::Tensor make_dtensor(const torch::Tensor& local, const DeviceMesh& mesh,
                           const Placements& placements, c10::IntArrayRef sizes) {
  register_dtensor();
  return dtensor::wrap(local.requires_grad() ? local.detach() : local,
                       dtensor::make_spec(mesh, placements), sizes);
}

const torch::Tensor& local_part(const torch::Tensor& tensor) {
  TORCH_CHECK_TYPE(is_dtensor(tensor), "expected a DTensor, got a plain tensor");
  return dtensor::local_of(tensor);
}

std::shared_ptr<WriteObserver> write_observer(const torch::Tensor& tensor) {
  return is_dtensor(tensor) ? dtensor::impl_of(tensor)->observer.lock() : nullptr;
}

void give_memory(const torch::Tensor& tensor, const at::TensorOptions& options) {
  dtensor::impl_of(tensor)->give_memory(options);
}

void set_write_observer(const torch::Tensor& tensor, std::weak_ptr<WriteObserver> observer) {
  TORCH_CHECK_TYPE(is_dtensor(tensor), "expected a DTensor, got a plain tensor");
  dtensor::impl_of(tensor)->observer = std::move(observer);
}

}  // namespace fsdp2
