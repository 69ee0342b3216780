#include "dtensor/differentiable.h"
#include "dtensor/global_size.h"
#include "dtensor/mirror.h"

#include <fsdp2/dtensor.h>

#include <c10/util/Exception.h>

#include <sstream>
#include <utility>

namespace fsdp2 {

using dtensor::spec_of;

DTensor::DTensor(const torch::Tensor& tensor) : torch::Tensor(tensor) {
  TORCH_CHECK_TYPE(is_dtensor(tensor), "expected a DTensor, got ",
                   tensor.defined()
                       ? "a plain tensor: make one with distribute_tensor or DTensor::from_local"
                       : "an undefined tensor");
}

DTensor DTensor::from_local(const torch::Tensor& local, const DeviceMesh& mesh,
                            Placements placements, std::optional<std::vector<int64_t>> size) {
  TORCH_CHECK_TYPE(local.defined() && !is_dtensor(local),
                   "DTensor::from_local takes a plain tensor");
  register_dtensor();
  const auto spec = dtensor::make_spec(
      mesh, dtensor::normalized(std::move(placements), local.dim(), "DTensor::from_local"));
  if (size) {
    dtensor::check_local_size(local, *spec, *size);
  } else {
    size = dtensor::gather_global_size(local, *spec);
  }
  return DTensor(dtensor::wrap_differentiably(local, spec, *size));
}

const DeviceMesh& DTensor::device_mesh() const { return spec_of(*this)->mesh; }

const Placements& DTensor::placements() const { return spec_of(*this)->placements; }

torch::Tensor DTensor::to_local() const {
  TORCH_CHECK_NOT_IMPLEMENTED(!dtensor::impl_of(*this)->mirror,
                              "to_local() of a view whose elements lie on several ranks: no rank "
                              "has a part of it. clone() it, or take full_tensor()");
  return dtensor::unwrap_differentiably(*this);
}

torch::Tensor DTensor::full_tensor() const {
  const auto& spec = spec_of(*this);
  if (spec->replicated) return dtensor::unwrap_differentiably(*this).clone();
  return dtensor::unwrap_differentiably(
      dtensor::redistribute_differentiably(*this, dtensor::all_replicate(*spec)));
}

DTensor DTensor::redistribute(Placements placements) const {
  placements = dtensor::normalized(std::move(placements), dim(), "redistribute");
  return DTensor(dtensor::redistribute_differentiably(
      *this, dtensor::with_placements(*spec_of(*this), std::move(placements))));
}

std::string DTensor::to_string() const {
  dtensor::update(*this);
  std::ostringstream out;
  out << "DTensor(local_tensor=" << local_part(*this)
      << ", device_mesh=" << device_mesh().to_string()
      << ", placements=" << fsdp2::to_string(placements()) << ')';
  return out.str();
}

std::ostream& operator<<(std::ostream& out, const DTensor& tensor) {
  return out << (tensor.defined() ? tensor.to_string() : "DTensor()");
}

}  // namespace fsdp2
