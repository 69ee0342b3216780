#include "dtensor/mirror.h"

#include "dtensor/redistribute.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

namespace fsdp2::dtensor {
namespace {

at::Tensor whole_now(const at::Tensor& tensor) {
  return local_of(redistributed(finished(tensor), all_replicate(*spec_of(tensor))));
}

/// `run(whole)` gives the views of it.
template <class Run>
void look_through(Call& call, Run&& run) {
  const at::Tensor self = call.arg(0).toTensor();
  const SpecPtr& from = spec_of(self);
  const SpecPtr spec = all_replicate(*from);
  const at::Tensor whole = whole_now(self);
  const bool shared = whole.is_alias_of(local_of(self));  // one rank along each dimension
  std::shared_ptr<Mirror> mirror;
  if (!shared && call.info.view) {
    mirror = std::make_shared<Mirror>();
    mirror->base = wrap_alias(local_of(self), from, self.sizes(), self);
    mirror->whole = whole;
    mirror->seen = *impl_of(self)->writes;
    mirror->version = version_of(local_of(self));
  }
  run(whole);
  dispatch::map_returns(call.info, call.stack, [&](const at::Tensor& result) {
    if (shared) return std::optional<at::Tensor>(wrap_alias(result, spec, result.sizes(), self));
    at::Tensor view = wrap(result, spec, result.sizes());
    impl_of(view)->mirror = mirror;
    impl_of(view)->observer = impl_of(self)->observer;
    impl_of(view)->writes = impl_of(self)->writes;
    return std::optional<at::Tensor>(view);
  });
}

}  // namespace

void view_of_whole(Call& call) {
  look_through(call, [&](const at::Tensor& whole) {
    call.arg(0) = whole;
    call.run();
  });
}

void view_of_whole(Call& call, c10::IntArrayRef sizes) {
  look_through(call, [&](const at::Tensor& whole) { call.finish(whole.view(sizes)); });
}

void update(Mirror& mirror) {
  const int64_t writes = *impl_of(mirror.base)->writes;
  const int64_t version = version_of(local_of(mirror.base));
  if (mirror.seen == writes) {
    TORCH_CHECK(mirror.version == version,
                "a view of elements that lie on several ranks, of a DTensor of size ",
                mirror.base.sizes(),
                ", was taken before to_local() of it was written: take the view after that");
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  mirror.whole.copy_(whole_now(mirror.base));
  mirror.seen = writes;
  mirror.version = version;
}

void write_back(Mirror& mirror) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor& local = local_of(mirror.base);
  local.copy_(part_of(mirror.whole, *spec_of(mirror.base)));
  bump_version_of(local);
  mirror.seen = *impl_of(mirror.base)->writes;
  mirror.version = version_of(local);
}

void check_writable(const Mirror& mirror) {
  TORCH_CHECK_NOT_IMPLEMENTED(!spec_of(mirror.base)->partial, "a view of a DTensor laid out as ",
                              to_string(spec_of(mirror.base)->placements),
                              " cannot be written: it is not reduced yet. redistribute() it first");
}

}  // namespace fsdp2::dtensor
