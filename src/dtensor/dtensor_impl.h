#pragma once

// What the rest of the library may do to a DTensor that a user may not: reach its local part
// without autograd, and be told of writes.

#include <fsdp2/dtensor.h>

#include <c10/core/TensorImpl.h>

#include <memory>

namespace fsdp2 {

/// Told when an op writes to a DTensor, before the write. Called on the writing thread.
class WriteObserver {
 public:
  virtual ~WriteObserver() = default;
  virtual void before_write() = 0;
};

/// Local part in -> DTensor out: no communication, no checks, not differentiable (a fresh leaf).
/// `placements` have non-negative dims. Shares memory with `local`.
torch::Tensor make_dtensor(const torch::Tensor& local, const DeviceMesh& mesh,
                           const Placements& placements, c10::IntArrayRef sizes);

/// The local part itself, without autograd. `tensor` must be a DTensor.
const torch::Tensor& local_part(const torch::Tensor& tensor);

/// Observes writes to this DTensor and to every detached alias made of it later (`data()`,
/// `detach()`).
void set_write_observer(const torch::Tensor& tensor, std::weak_ptr<WriteObserver> observer);

/// Null if there is none, or `tensor` is plain.
std::shared_ptr<WriteObserver> write_observer(const torch::Tensor& tensor);

/// A DTensor on the meta device gets uninitialised memory; it stays the same tensor, and so do its
/// aliases.
void give_memory(const torch::Tensor& tensor, const at::TensorOptions& options);

/// Makes torch's dispatcher know DTensors; called by everything that makes one. Cheap after the
/// first time.
void register_dtensor();

}  // namespace fsdp2
