#pragma once

// The TensorImpl behind a DTensor: global size outside, this rank's part inside.

#include "dtensor/dtensor_impl.h"
#include "dtensor/spec.h"

#include <c10/core/TensorImpl.h>

#include <atomic>
#include <memory>

namespace fsdp2::dtensor {

/// The reduced value of a Partial, kept so that it is asked of the other ranks once. Shared by
/// aliases.
struct Finished {
  at::Tensor value;
  int64_t version = 0;  // of the local part when it was reduced
};

struct Mirror;  // see mirror.h

struct DTensorImpl : c10::TensorImpl {
  DTensorImpl(at::Tensor local, SpecPtr spec, c10::IntArrayRef sizes);

  at::Tensor local;  // without autograd history
  SpecPtr spec;
  std::weak_ptr<WriteObserver> observer;
  std::shared_ptr<Finished> finished;            // of Partials
  std::shared_ptr<Mirror> mirror;                // of a view of elements that lie on several ranks
  std::shared_ptr<std::atomic<int64_t>> writes;  // by ops on DTensors; shared by aliases
  std::atomic<bool> converts_grad = false;       // see autograd.h

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allow_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allow_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& source) override;
  const char* tensorimpl_type_name() const override;

  /// The local part, on the meta device until now, gets uninitialised memory.
  void give_memory(const at::TensorOptions& options);
};

inline DTensorImpl* impl_of(const at::Tensor& tensor) {
  return static_cast<DTensorImpl*>(tensor.unsafeGetTensorImpl());
}
inline const at::Tensor& local_of(const at::Tensor& tensor) { return impl_of(tensor)->local; }
/// What every write to a local part changes, also one around DTensor ops, through to_local().
inline int64_t version_of(const at::Tensor& local) {
  return local.is_inference() ? 0 : static_cast<int64_t>(local._version());
}
void bump_version_of(const at::Tensor& local);
/// From here on writes to `alias`, of `local`'s memory, change the version of both.
void share_version(const at::Tensor& alias, const at::Tensor& local);
inline const SpecPtr& spec_of(const at::Tensor& tensor) { return impl_of(tensor)->spec; }

/// A new DTensor around `local`. Of an alias, `source` passes its write observer on.
at::Tensor wrap(at::Tensor local, SpecPtr spec, c10::IntArrayRef sizes);
at::Tensor wrap_alias(at::Tensor local, SpecPtr spec, c10::IntArrayRef sizes,
                      const at::Tensor& source);

/// To be called before the local part of `tensor` is written.
void announce_write(const at::Tensor& tensor);

inline bool has_write_observer(const at::Tensor& tensor) {
  return !impl_of(tensor)->observer.expired();
}

}  // namespace fsdp2::dtensor
