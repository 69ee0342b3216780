#include "comm/counting.h"
#include "comm/exits.h"
#include "comm/groups.h"
#include "comm/reduce.h"
#include "comm/work.h"

#include <fsdp2/collectives.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <torch/torch.h>

#include <algorithm>
#include <mutex>
#include <numeric>

namespace fsdp2 {
namespace {

using comm::CollectiveWork;

struct Counter {
  std::mutex mutex;
  CollectiveCounts counts;
};
Counter& counter() {
  static Counter instance;
  return instance;
}
thread_local int uncounted = 0;

void count(int64_t CollectiveCounts::* kind, const at::Tensor& largest) {
  comm::count_collective(kind, static_cast<int64_t>(largest.nbytes()));
}

/// One call: its name, group and, once checked, tensors.
struct Call {
  const char* name;
  const ProcessGroup& group;

  Call(const char* name, const ProcessGroup& group) : name(name), group(group) {
    TORCH_CHECK(group, name, ": the group is null (this rank is not a member of it)");
    if (size() > 1 && comm::forked_from_a_rank()) comm::check_not_forked(name + where());
  }

  int size() const { return group->getSize(); }

  comm::CallText what(const at::Tensor& tensor) const {
    return {name, tensor.numel(), tensor.scalar_type(), group};
  }
  std::string where() const { return comm::CallText{name, 0, {}, group}.where(); }

  void check(const at::Tensor& tensor, const char* parameter) const {
    TORCH_CHECK(tensor.defined(), name, where(), ": `", parameter, "` is undefined");
    TORCH_CHECK(tensor.layout() == at::kStrided && tensor.has_storage(), name, where(), ": `",
                parameter,
                "` is not a plain dense tensor: pass to_local() of a DTensor, to_dense() of a "
                "sparse tensor");
    TORCH_CHECK(tensor.is_contiguous(), name, where(), ": `", parameter,
                "` is not contiguous (sizes ", tensor.sizes(), ", strides ", tensor.strides(),
                "): pass contiguous()");
    TORCH_CHECK(size() == 1 || comm::has_backend(group, tensor.device().type()), name, where(),
                ": `", parameter, "` is on ", tensor.device(),
                ", for which the group has no backend (init_process_group's `backend`)");
  }
  void check_pair(const at::Tensor& output, const at::Tensor& input) const {
    check(output, "output");
    check(input, "input");
    TORCH_CHECK(output.scalar_type() == input.scalar_type(), name, where(), ": `output` is ",
                output.scalar_type(), " but `input` is ", input.scalar_type());
    TORCH_CHECK(output.device() == input.device(), name, where(), ": `output` is on ",
                output.device(), " but `input` is on ", input.device());
  }

  c10::intrusive_ptr<c10d::Backend> backend(const at::Tensor& tensor) const {
    return group->getBackend(tensor.device().type());
  }

  /// Starts the backend's collective; what it throws at once says as much as what wait() throws.
  template <class Start>
  Work start(const at::Tensor& largest, std::vector<at::Tensor> tensors, Start&& start,
             std::function<void()> finish = {}) const {
    const auto begin = std::chrono::steady_clock::now();
    try {
      return c10::make_intrusive<CollectiveWork>(start(*backend(largest)), std::move(tensors),
                                                 what(largest), std::move(finish));
    } catch (const std::exception& error) {
      comm::throw_collective_error(what(largest).text(), error, begin);
    }
  }
};

Work done() {
  return c10::make_intrusive<CollectiveWork>(nullptr, std::vector<at::Tensor>(), comm::CallText());
}

/// The tensor without autograd, as the backend is to see it: bytes where only bytes are moved (gloo
/// knows few dtypes).
at::Tensor as_bytes(const at::Tensor& tensor) { return tensor.detach().view({-1}).view(at::kByte); }
at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor.detach()) : tensor.detach();
}

void copy_local(const at::Tensor& output, const at::Tensor& input) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  if (!output.is_same(input)) output.view({-1}).copy_(input.view({-1}));
}

bool averages(const c10d::Backend& backend) {
  const std::string name = backend.getBackendName();
  return name == "nccl" || name == "shm" || name == "hosts";
}

c10d::ReduceOp backend_op(ReduceOp op, const c10d::Backend& backend) {
  switch (op) {
    case ReduceOp::kSum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::kAvg:
      return averages(backend) ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
    case ReduceOp::kMax:
      return c10d::ReduceOp::MAX;
    case ReduceOp::kMin:
      return c10d::ReduceOp::MIN;
    case ReduceOp::kProduct:
      return c10d::ReduceOp::PRODUCT;
  }
  TORCH_CHECK(false, "unknown ReduceOp ", static_cast<int>(op));
}

void check_reducible(const Call& call, const at::Tensor& tensor, ReduceOp op) {
  const at::ScalarType type = tensor.scalar_type();
  const bool floating = tensor.is_floating_point() && tensor.element_size() >= 2;
  const bool integer =
      type == at::kChar || type == at::kByte || type == at::kInt || type == at::kLong;
  TORCH_CHECK(floating || integer || tensor.is_complex(), call.name, call.where(),
              ": cannot reduce ", type,
              ": convert to a floating dtype, int8, uint8, int32 or int64");
  TORCH_CHECK(op != ReduceOp::kAvg || !integer, call.name, call.where(), ": kAvg of ", type,
              " is not whole: use kSum, or a floating dtype");
  TORCH_CHECK(!tensor.is_complex() || op == ReduceOp::kSum || op == ReduceOp::kAvg, call.name,
              call.where(), ": complex numbers can be summed and averaged only");
}

/// The division that an average over a summing backend still needs.
std::function<void()> division(const Call& call, const at::Tensor& output, ReduceOp op) {
  if (op != ReduceOp::kAvg || averages(*call.backend(output))) return {};
  return [output, size = call.size()] {
    const at::AutoDispatchBelowADInplaceOrView guard;
    output.div_(size);
  };
}

/// gloo's own reduce-scatter copies the input, all-reduces the whole of it and cuts a part out.
bool better_by_exchange(const c10d::Backend& backend, const at::Tensor& input, ReduceOp op) {
  return backend.getBackendName() == "gloo" && input.is_floating_point() &&
         (op == ReduceOp::kSum || op == ReduceOp::kAvg);
}

/// Everybody's part for this rank, then their sum. Flat and real; `finish` comes after.
Work reduce_scatter_by_exchange(const Call& call, const at::Tensor& to, const at::Tensor& from,
                                std::vector<at::Tensor> kept, std::function<void()> finish) {
  const at::Tensor received = at::empty_like(from);
  kept.push_back(received);
  at::Tensor received_bytes = as_bytes(received), sent_bytes = as_bytes(from);
  std::vector<int64_t> splits(static_cast<size_t>(call.size()), sent_bytes.numel() / call.size());
  std::vector<int64_t> same = splits;
  return call.start(
      from, std::move(kept),
      [&](c10d::Backend& backend) {
        return backend.alltoall_base(received_bytes, sent_bytes, splits, same);
      },
      [to, received, size = call.size(), finish = std::move(finish)] {
        std::vector<const std::byte*> parts;
        parts.reserve(static_cast<size_t>(size));
        const auto* bytes = static_cast<const std::byte*>(received.const_data_ptr());
        for (int rank = 0; rank < size; ++rank) parts.push_back(bytes + rank * to.nbytes());
        comm::add_up(static_cast<std::byte*>(to.mutable_data_ptr()), parts, to.numel(),
                     to.scalar_type());
        if (finish) finish();
      });
}

/// A device that the group can move small tensors on.
c10::Device exchange_device(const ProcessGroup& group) {
  if (comm::has_backend(group, c10::kCPU)) return c10::kCPU;
  return get_device();
}

}  // namespace

void comm::count_collective(int64_t CollectiveCounts::* kind, int64_t bytes) {
  if (uncounted > 0) return;
  const std::lock_guard lock(counter().mutex);
  ++(counter().counts.*kind);
  counter().counts.bytes += bytes;
}
comm::Uncounted::Uncounted() { ++uncounted; }
comm::Uncounted::~Uncounted() { --uncounted; }

Work all_gather_single(const torch::Tensor& output, const torch::Tensor& input,
                       const ProcessGroup& group) {
  const Call call("all_gather_single", group);
  call.check_pair(output, input);
  TORCH_CHECK(output.numel() == call.size() * input.numel(), call.name, call.where(),
              ": `output` has ", output.numel(), " elements; it needs ", call.size(), " x ",
              input.numel(), " (group size x `input`)");
  if (call.size() == 1) copy_local(output, input);
  if (call.size() == 1 || input.numel() == 0) return done();
  count(&CollectiveCounts::all_gathers, output);
  at::Tensor to = as_bytes(output), from = as_bytes(input);
  return call.start(output, {output, input},
                    [&](c10d::Backend& backend) { return backend._allgather_base(to, from); });
}

Work reduce_scatter_single(const torch::Tensor& output, const torch::Tensor& input, ReduceOp op,
                           const ProcessGroup& group) {
  const Call call("reduce_scatter_single", group);
  call.check_pair(output, input);
  check_reducible(call, input, op);
  TORCH_CHECK(input.numel() == call.size() * output.numel(), call.name, call.where(),
              ": `input` has ", input.numel(), " elements; it needs ", call.size(), " x ",
              output.numel(), " (group size x `output`)");
  if (call.size() == 1) copy_local(output, input);
  if (call.size() == 1 || input.numel() == 0) return done();
  count(&CollectiveCounts::reduce_scatters, input);
  at::Tensor to = as_real(output).view({-1}), from = as_real(input).view({-1});
  if (better_by_exchange(*call.backend(input), from, op)) {
    return reduce_scatter_by_exchange(call, to, from, {output, input}, division(call, output, op));
  }
  return call.start(
      input, {output, input},
      [&](c10d::Backend& backend) {
        c10d::ReduceScatterOptions options;
        options.reduceOp = backend_op(op, backend);
        return backend._reduce_scatter_base(to, from, options);
      },
      division(call, output, op));
}

Work all_reduce(const torch::Tensor& tensor, ReduceOp op, const ProcessGroup& group) {
  const Call call("all_reduce", group);
  call.check(tensor, "tensor");
  check_reducible(call, tensor, op);
  if (call.size() == 1 || tensor.numel() == 0) return done();
  count(&CollectiveCounts::all_reduces, tensor);
  std::vector<at::Tensor> tensors = {as_real(tensor)};
  return call.start(
      tensor, {tensor},
      [&](c10d::Backend& backend) {
        c10d::AllreduceOptions options;
        options.reduceOp = backend_op(op, backend);
        return backend.allreduce(tensors, options);
      },
      division(call, tensor, op));
}

Work broadcast(const torch::Tensor& tensor, int source, const ProcessGroup& group) {
  const Call call("broadcast", group);
  call.check(tensor, "tensor");
  TORCH_CHECK(source >= 0 && source < call.size(), call.name, call.where(), ": `source` is ",
              source, ", outside 0 to ", call.size() - 1, " (it counts within the group)");
  if (call.size() == 1 || tensor.numel() == 0) return done();
  count(&CollectiveCounts::broadcasts, tensor);
  std::vector<at::Tensor> tensors = {as_bytes(tensor)};
  return call.start(tensor, {tensor}, [&](c10d::Backend& backend) {
    c10d::BroadcastOptions options;
    options.rootRank = source;
    return backend.broadcast(tensors, options);
  });
}

Work scatter(const torch::Tensor& output, const torch::Tensor& input, int source,
             const ProcessGroup& group) {
  const Call call("scatter", group);
  call.check(output, "output");
  TORCH_CHECK(source >= 0 && source < call.size(), call.name, call.where(), ": `source` is ",
              source, ", outside 0 to ", call.size() - 1, " (it counts within the group)");
  const bool sends = group->getRank() == source;
  if (sends) {
    call.check_pair(output, input);
    TORCH_CHECK(input.numel() == call.size() * output.numel(), call.name, call.where(),
                ": `input` has ", input.numel(), " elements; it needs ", call.size(), " x ",
                output.numel(), " (group size x `output`)");
  } else {
    TORCH_CHECK(!input.defined(), call.name, call.where(), ": only rank ", source,
                " of the group gives `input`; pass an undefined tensor");
  }
  if (call.size() == 1) copy_local(output, input);
  if (call.size() == 1 || output.numel() == 0) return done();
  count(&CollectiveCounts::scatters, sends ? input : output);
  std::vector<at::Tensor> to = {as_bytes(output)};
  std::vector<std::vector<at::Tensor>> from;
  if (sends) from.push_back(as_bytes(input).chunk(call.size()));
  std::vector<at::Tensor> kept = {output};
  if (sends) kept.push_back(input);
  return call.start(sends ? input : output, std::move(kept), [&](c10d::Backend& backend) {
    c10d::ScatterOptions options;
    options.rootRank = source;
    return backend.scatter(to, from, options);
  });
}

Work all_to_all_single(const torch::Tensor& output, const torch::Tensor& input,
                       const std::vector<int64_t>& output_splits,
                       const std::vector<int64_t>& input_splits, const ProcessGroup& group) {
  const Call call("all_to_all_single", group);
  call.check_pair(output, input);
  const auto check_splits = [&](const char* what, const torch::Tensor& tensor,
                                const std::vector<int64_t>& splits) {
    const int64_t total = std::accumulate(splits.begin(), splits.end(), int64_t{0});
    const bool negative =
        std::any_of(splits.begin(), splits.end(), [](int64_t n) { return n < 0; });
    TORCH_CHECK(
        static_cast<int>(splits.size()) == call.size() && total == tensor.numel() && !negative,
        call.name, call.where(), ": `", what, "_splits` are ", c10::IntArrayRef(splits),
        "; they must be ", call.size(), " numbers of elements that add up to the ", tensor.numel(),
        " of `", what, '`');
  };
  check_splits("output", output, output_splits);
  check_splits("input", input, input_splits);
  if (call.size() == 1) copy_local(output, input);
  if (call.size() == 1) return done();
  const at::Tensor& largest = input.numel() >= output.numel() ? input : output;
  count(&CollectiveCounts::all_to_alls, largest);
  const auto bytes = [&](std::vector<int64_t> splits) {
    for (int64_t& split : splits) split *= static_cast<int64_t>(input.element_size());
    return splits;
  };
  at::Tensor to = as_bytes(output), from = as_bytes(input);
  std::vector<int64_t> received = bytes(output_splits), sent = bytes(input_splits);
  return call.start(largest, {output, input}, [&](c10d::Backend& backend) {
    return backend.alltoall_base(to, from, received, sent);
  });
}

Work barrier(const ProcessGroup& group) {
  const Call call("barrier", group);
  if (call.size() == 1) return done();
  const c10::Device device = exchange_device(group);
  const at::Tensor none = at::empty({0}, device);
  count(&CollectiveCounts::others, none);
  return call.start(none, {}, [&](c10d::Backend& backend) {
    c10d::BarrierOptions options;
    if (device.is_cuda()) options.device = device;
    return backend.barrier(options);
  });
}

void wait(const Work& work, const std::string& what) {
  if (!work) return;
  if (!what.empty()) comm::note_doing(what);
  try {
    TORCH_CHECK(work->wait(), "the collective was aborted");
  } catch (c10::Error& error) {
    if (!what.empty()) error.add_context("in " + what);
    throw;
  }
}

std::vector<std::string> all_gather_bytes(const std::string& bytes, const ProcessGroup& group) {
  const Call call("all_gather_bytes", group);
  if (call.size() == 1) return {bytes};
  const c10::Device device = exchange_device(group);
  const int64_t own = static_cast<int64_t>(bytes.size());
  const at::Tensor lengths = at::empty({call.size()}, at::device(device).dtype(at::kLong));
  wait(all_gather_single(lengths, at::full({1}, own, lengths.options()), group),
       "all_gather_bytes");
  const at::Tensor lengths_here = lengths.cpu();
  const int64_t* length = lengths_here.const_data_ptr<int64_t>();
  const int64_t longest = *std::max_element(length, length + call.size());

  at::Tensor padded = at::zeros({longest}, at::kByte);
  std::copy(bytes.begin(), bytes.end(), padded.mutable_data_ptr<uint8_t>());
  const at::Tensor all = at::empty({call.size() * longest}, at::device(device).dtype(at::kByte));
  wait(all_gather_single(all, padded.to(device), group), "all_gather_bytes");
  const at::Tensor here = all.cpu();
  const char* data = reinterpret_cast<const char*>(here.const_data_ptr<uint8_t>());
  std::vector<std::string> result;
  result.reserve(static_cast<size_t>(call.size()));
  for (int rank = 0; rank < call.size(); ++rank)
    result.emplace_back(data + rank * longest, length[rank]);
  return result;
}

CollectiveCounts collective_counts() {
  const std::lock_guard lock(counter().mutex);
  return counter().counts;
}

void reset_collective_counts() {
  const std::lock_guard lock(counter().mutex);
  counter().counts = {};
}

}  // namespace fsdp2
