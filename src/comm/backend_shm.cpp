// Backend "shm": c10d's face of it. What it does is in shm_*.

#include "comm/backend_shm.h"

#include "comm/backend.h"
#include "comm/backend_checks.h"
#include "comm/groups.h"
#include "comm/reduce.h"
#include "comm/shm/collectives.h"
#include "comm/shm/engine.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>

#include <numeric>
#include <type_traits>
#include <utility>

namespace fsdp2::comm {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Smaller ones are reduced whole by every rank: one step instead of two.
constexpr int64_t kReduceWholeBytes = int64_t{64} * 1024;

std::byte* data_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}
const std::byte* input_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}
int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

class ShmBackend final : public c10d::Backend {
 public:
  ShmBackend(const std::shared_ptr<ShmSegment>& segment, c10::intrusive_ptr<Options> options)
      : c10d::Backend(segment->rank(), segment->size()),
        engine_(ShmEngine::make(segment, options->timeout)),
        driver_(std::make_shared<ShmDriver>(engine_)),
        options_(std::move(options)),
        checks_("shm", options_->group_name),
        capacity_(static_cast<int64_t>(segment->to_all(0).capacity)) {}
  ~ShmBackend() override { leave(); }

  const std::string getBackendName() const override { return "shm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override {
    options_->timeout = timeout;
    engine_->set_timeout(timeout);
  }
  void abort() override { engine_->abort(); }
  void shutdown() override { leave(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return engine_->sequence(); }

  std::string break_up(const std::string& why) { return engine_->break_up(why); }
  std::shared_ptr<Presence> presence() const { return engine_->segment().presence(); }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return start(make<ShmSpread>(ShmKind::kBarrier, 0, options.timeout, {}, 0));
  }
  /// The error names all ranks that are missing.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool) override {
    barrier(options)->wait(kNoTimeout);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const at::Tensor& tensor = single(tensors, "broadcast");
    const int root = check_root(options.rootRank, "broadcast");
    auto work = make<ShmSpread>(ShmKind::kBroadcast, bytes_of(tensor), options.timeout, tensors, 1);
    work->call.root = root;
    spread(*work, bytes_of(tensor));
    if (root == rank_) {
      work->send = input_of(tensor);
    } else {
      work->receive[static_cast<size_t>(root)] = data_of(tensor);
    }
    return start(std::move(work));
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    checks_.tensor(output, "all_gather");
    checks_.tensor(input, "all_gather");
    check_amount(bytes_of(output), bytes_of(input) * size_, "all_gather", "output");
    auto work =
        make<ShmSpread>(ShmKind::kAllGather, bytes_of(input), options.timeout, {output, input}, 1);
    spread(*work, bytes_of(input));
    work->send = input_of(input);
    for (int rank = 0; rank < size_; ++rank)
      work->receive[static_cast<size_t>(rank)] = data_of(output) + rank * bytes_of(input);
    work->own = work->receive[static_cast<size_t>(rank_)];
    return start(std::move(work));
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    const at::Tensor& input = single(inputs, "all_gather");
    check_list(outputs, "all_gather");
    return gather_into(outputs[0], input, options.timeout, outputs[0]);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(outputs.size() == inputs.size(), "shm: all_gather of ", inputs.size(),
                " tensors into ", outputs.size());
    return each(inputs.size(), outputs,
                [&](size_t i) { return _allgather_base(outputs[i], inputs[i], options); });
  }

  /// outputs: for each rank, what it has in its inputs.
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(outputs.size() == static_cast<size_t>(size_), "shm: all_gather of ", size_,
                " ranks into lists of ", outputs.size());
    Tensors all;
    for (const Tensors& of_rank : outputs) {
      TORCH_CHECK(of_rank.size() == inputs.size(), "shm: all_gather of ", inputs.size(),
                  " tensors into ", of_rank.size());
      all.insert(all.end(), of_rank.begin(), of_rank.end());
    }
    return each(inputs.size(), all, [&](size_t i) {
      Tensors to;
      to.reserve(outputs.size());
      for (const Tensors& of_rank : outputs) to.push_back(of_rank[i]);
      return gather_into(to, inputs[i], options.timeout, to);
    });
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    const at::Tensor& input = single(inputs, "gather");
    const int root = check_root(options.rootRank, "gather");
    if (root == rank_) check_list(outputs, "gather");
    Tensors kept = root == rank_ ? outputs[0] : Tensors();
    const size_t results = kept.size();
    kept.push_back(input);
    auto work =
        exchange(ShmKind::kGather, bytes_of(input), options.timeout, std::move(kept), results);
    work->call.root = root;
    work->send[static_cast<size_t>(root)] = {const_cast<std::byte*>(input_of(input)),
                                             bytes_of(input)};
    if (root == rank_) receive_list(*work, outputs[0], bytes_of(input), "gather");
    return start(std::move(work));
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    const at::Tensor& output = single(outputs, "scatter");
    const int root = check_root(options.rootRank, "scatter");
    Tensors kept = outputs;
    if (root == rank_) {
      check_list(inputs, "scatter");
      kept.insert(kept.end(), inputs[0].begin(), inputs[0].end());
    }
    auto work = exchange(ShmKind::kScatter, bytes_of(output), options.timeout, std::move(kept), 1);
    work->call.root = root;
    work->receive[static_cast<size_t>(root)] = {data_of(output), bytes_of(output)};
    if (root == rank_) send_list(*work, inputs[0], "scatter");
    return start(std::move(work));
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    auto work = exchange(ShmKind::kAllToAll, 0, options.timeout, {output, input}, 1);
    split(work->receive, output, output_splits, "output");
    split(work->send, input, input_splits, "input");
    check_own(*work);
    return start(std::move(work));
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    Tensors kept = outputs;
    kept.insert(kept.end(), inputs.begin(), inputs.end());
    auto work = exchange(ShmKind::kAllToAll, 0, options.timeout, std::move(kept), outputs.size());
    receive_list(*work, outputs, -1, "all_to_all");
    send_list(*work, inputs, "all_to_all");
    check_own(*work);
    return start(std::move(work));
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const at::Tensor& tensor = single(tensors, "all_reduce");
    checks_.reduction(tensor, options.reduceOp);
    if (options.reduceOp == c10d::ReduceOp::PREMUL_SUM) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      tensor.copy_(premultiplied(tensor, options.reduceOp));
    }
    const int64_t bytes = bytes_of(tensor);
    if (bytes <= kReduceWholeBytes || size_ == 1) {
      auto work = reduction<ShmReduceWhole>(ShmKind::kAllReduce, tensor, bytes, options.timeout,
                                            tensors, options.reduceOp);
      work->send = input_of(tensor);
      work->output = data_of(tensor);
      return start(std::move(work));
    }
    auto work = reduction<ShmReduceInBlocks>(ShmKind::kAllReduce, tensor, bytes, options.timeout,
                                             tensors, options.reduceOp);
    work->data = data_of(tensor);
    return start(std::move(work));
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return each(tensors.size(), tensors, [&](size_t i) {
      Tensors one = {tensors[i]};
      return allreduce(one, options);
    });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const at::Tensor& tensor = single(tensors, "reduce");
    const int root = check_root(options.rootRank, "reduce");
    checks_.reduction(tensor, options.reduceOp);
    const at::Tensor input = premultiplied(tensor, options.reduceOp);
    auto work = reduction<ShmReduceWhole>(ShmKind::kReduce, input, bytes_of(tensor),
                                          options.timeout, {tensor, input}, options.reduceOp);
    work->call.root = root;
    work->send = input_of(input);
    if (root == rank_) work->output = data_of(tensor);
    return start(std::move(work));
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    checks_.tensor(output, "reduce_scatter");
    checks_.tensor(input, "reduce_scatter");
    checks_.same_type(output, input, "reduce_scatter");
    check_amount(bytes_of(input), bytes_of(output) * size_, "reduce_scatter", "input");
    checks_.reduction(input, options.reduceOp);
    const at::Tensor from = premultiplied(input, options.reduceOp);
    auto work = reduction<ShmReduceScatter>(ShmKind::kReduceScatter, output, bytes_of(output),
                                            options.timeout, {output, from}, options.reduceOp);
    work->call.bytes = bytes_of(input);
    for (int rank = 0; rank < size_; ++rank)
      work->send.push_back(input_of(from) + rank * bytes_of(output));
    work->output = data_of(output);
    return start(std::move(work));
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    const at::Tensor& output = single(outputs, "reduce_scatter");
    check_list(inputs, "reduce_scatter");
    checks_.reduction(output, options.reduceOp);
    Tensors kept = {output};
    for (const at::Tensor& input : inputs[0]) {
      checks_.tensor(input, "reduce_scatter");
      checks_.same_type(output, input, "reduce_scatter");
      check_amount(bytes_of(input), bytes_of(output), "reduce_scatter", "input");
      kept.push_back(premultiplied(input, options.reduceOp));
    }
    auto work = reduction<ShmReduceScatter>(ShmKind::kReduceScatter, output, bytes_of(output),
                                            options.timeout, kept, options.reduceOp);
    work->call.bytes = bytes_of(output) * size_;
    for (int rank = 0; rank < size_; ++rank)
      work->send.push_back(input_of(kept[static_cast<size_t>(rank) + 1]));
    work->output = data_of(output);
    return start(std::move(work));
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(outputs.size() == inputs.size(), "shm: reduce_scatter of ", inputs.size(),
                " tensors into ", outputs.size());
    return each(inputs.size(), outputs,
                [&](size_t i) { return _reduce_scatter_base(outputs[i], inputs[i], options); });
  }

  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return start(message(tensors, to, tag, "send"));
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return start(message(tensors, from, tag, "recv"));
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return start(message(tensors, -1, tag, "recv"));
  }

 private:
  void leave() {
    engine_->close();
    driver_->stop();
  }

  template <class W>
  c10::intrusive_ptr<W> make(ShmKind kind, int64_t bytes, std::chrono::milliseconds timeout,
                             Tensors kept, size_t results) {
    auto work = c10::make_intrusive<W>(engine_, driver_, std::move(kept), results);
    work->call.kind = kind;
    work->call.bytes = bytes;
    work->timeout = timeout;
    return work;
  }
  template <class W>
  WorkPtr start(c10::intrusive_ptr<W> work) {
    WorkPtr started = work;
    if constexpr (std::is_same_v<W, ShmMessage>) {
      engine_->start_message(std::move(work));
    } else {
      engine_->start(std::move(work));
    }
    return started;
  }

  /// `start_one` for each of `count`. The works of a group end in order, so the last stands for
  /// all.
  template <class StartOne>
  WorkPtr each(size_t count, const Tensors& results, StartOne&& start_one) {
    for (size_t i = 0; i < count; ++i) start_one(i);
    return start(
        make<ShmSpread>(ShmKind::kBarrier, 0, c10d::kUnsetTimeout, results, results.size()));
  }

  void spread(ShmSpread& work, int64_t bytes) const {
    work.bytes = bytes;
    work.capacity = capacity_;
    work.receive.resize(static_cast<size_t>(size_), nullptr);
  }

  WorkPtr gather_into(const Tensors& outputs, const at::Tensor& input,
                      std::chrono::milliseconds timeout, Tensors kept) {
    checks_.tensor(input, "all_gather");
    kept.push_back(input);
    auto work = make<ShmSpread>(ShmKind::kAllGather, bytes_of(input), timeout, std::move(kept),
                                outputs.size());
    spread(*work, bytes_of(input));
    work->send = input_of(input);
    for (int rank = 0; rank < size_; ++rank) {
      const at::Tensor& output = outputs[static_cast<size_t>(rank)];
      checks_.tensor(output, "all_gather");
      check_amount(bytes_of(output), bytes_of(input), "all_gather", "output");
      work->receive[static_cast<size_t>(rank)] = data_of(output);
    }
    work->own = work->receive[static_cast<size_t>(rank_)];
    return start(std::move(work));
  }

  c10::intrusive_ptr<ShmExchange> exchange(ShmKind kind, int64_t bytes,
                                           std::chrono::milliseconds timeout, Tensors kept,
                                           size_t results) {
    auto work = make<ShmExchange>(kind, bytes, timeout, std::move(kept), results);
    work->send.resize(static_cast<size_t>(size_));
    work->receive.resize(static_cast<size_t>(size_));
    work->rank = rank_;
    work->capacity = capacity_;
    work->who = engine_->segment().presence().get();
    return work;
  }
  /// `bytes` of each; -1: any.
  void receive_list(ShmExchange& work, const Tensors& outputs, int64_t bytes,
                    const char* name) const {
    check_count(outputs, name);
    for (size_t rank = 0; rank < outputs.size(); ++rank) {
      checks_.tensor(outputs[rank], name);
      if (bytes >= 0) check_amount(bytes_of(outputs[rank]), bytes, name, "output");
      work.receive[rank] = {data_of(outputs[rank]), bytes_of(outputs[rank])};
    }
  }
  void send_list(ShmExchange& work, const Tensors& inputs, const char* name) const {
    check_count(inputs, name);
    for (size_t rank = 0; rank < inputs.size(); ++rank) {
      checks_.tensor(inputs[rank], name);
      if (work.call.kind == ShmKind::kScatter)
        check_amount(bytes_of(inputs[rank]), work.call.bytes, name, "input");
      work.send[rank] = {const_cast<std::byte*>(input_of(inputs[rank])), bytes_of(inputs[rank])};
    }
  }
  /// `splits` count rows; none: equal parts.
  template <class Parts>
  void split(Parts& parts, const at::Tensor& tensor, const std::vector<int64_t>& splits,
             const char* what) const {
    checks_.tensor(tensor, "all_to_all");
    const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
    const int64_t total =
        splits.empty() ? rows : std::accumulate(splits.begin(), splits.end(), int64_t{0});
    TORCH_CHECK(total == rows && (splits.empty() ? rows % size_ == 0
                                                 : splits.size() == static_cast<size_t>(size_)),
                "shm: all_to_all: ", splits.size(), " splits of the ", what, " add up to ", total,
                "; it has ", rows, " rows for ", size_, " ranks");
    const int64_t row = rows > 0 ? bytes_of(tensor) / rows : 0;
    std::byte* next = const_cast<std::byte*>(input_of(tensor));
    for (int rank = 0; rank < size_; ++rank) {
      const auto at = static_cast<size_t>(rank);
      parts[at] = {next, row * (splits.empty() ? rows / size_ : splits[at])};
      next += parts[at].bytes;
    }
  }
  void check_own(const ShmExchange& work) const {
    const auto own = static_cast<size_t>(rank_);
    check_amount(work.receive[own].bytes, work.send[own].bytes, "all_to_all", "own part");
  }

  template <class W>
  c10::intrusive_ptr<W> reduction(ShmKind kind, const at::Tensor& tensor, int64_t bytes,
                                  std::chrono::milliseconds timeout, const Tensors& kept,
                                  const c10d::ReduceOp& op) {
    auto work = make<W>(kind, bytes, timeout, kept, 1);
    work->call.reduces = 1;
    work->call.dtype = static_cast<uint8_t>(tensor.scalar_type());
    work->call.op = static_cast<uint8_t>(op.op_);
    work->rank = rank_;
    work->size = size_;
    work->bytes = bytes;
    work->capacity = capacity_;
    work->type = tensor.scalar_type();
    work->op = op.op_;
    work->together = true;
    return work;
  }
  static at::Tensor premultiplied(const at::Tensor& input, const c10d::ReduceOp& op) {
    if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return input;
    const auto* by = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK(by, "shm: PREMUL_SUM without its factor");
    const at::AutoDispatchBelowADInplaceOrView guard;
    return by->tensor_factor.defined() ? input.mul(by->tensor_factor.to(input.scalar_type()))
                                       : input.mul(by->double_factor);
  }

  c10::intrusive_ptr<ShmMessage> message(const Tensors& tensors, int peer, int tag,
                                         const char* name) {
    const at::Tensor& tensor = single(tensors, name);
    const bool sends = name[0] == 's';
    TORCH_CHECK(tag >= 0, "shm: ", name, ": the tag is ", tag, ": it must not be negative");
    TORCH_CHECK((peer >= 0 || !sends) && peer >= -1 && peer < size_ && peer != rank_, "shm: ", name,
                ": rank ", peer, " of group '", options_->group_name,
                peer == rank_ ? "' is this rank itself" : "' does not exist");
    auto work = make<ShmMessage>(ShmKind::kMessage, bytes_of(tensor), c10d::kUnsetTimeout, tensors,
                                 sends ? 0 : 1);
    work->call.root = tag;
    work->sends = sends;
    work->peer = peer;
    work->data = sends ? const_cast<std::byte*>(input_of(tensor)) : data_of(tensor);
    return work;
  }

  const at::Tensor& single(const Tensors& tensors, const char* name) const {
    checks_.one_tensor(tensors, name);
    return tensors[0];
  }
  void check_count(const Tensors& tensors, const char* name) const {
    TORCH_CHECK(tensors.size() == static_cast<size_t>(size_), "shm: ", name, ": a list of ",
                tensors.size(), " tensors; it needs ", size_, ", one for each rank");
  }
  void check_list(const std::vector<Tensors>& lists, const char* name) const {
    TORCH_CHECK(lists.size() == 1, "shm: ", name, " takes one list of tensors, not ", lists.size());
    check_count(lists[0], name);
  }
  void check_amount(int64_t bytes, int64_t needed, const char* name, const char* what) const {
    TORCH_CHECK(bytes == needed, "shm: ", name, " in group '", options_->group_name, "': the ",
                what, " has ", bytes, " bytes; it needs ", needed);
  }
  int check_root(int64_t root, const char* name) const {
    TORCH_CHECK(root >= 0 && root < size_, "shm: ", name, ": the root is ", root, ", outside 0 to ",
                size_ - 1);
    return static_cast<int>(root);
  }

  const std::shared_ptr<ShmEngine> engine_;
  const std::shared_ptr<ShmDriver> driver_;
  const c10::intrusive_ptr<Options> options_;
  const BackendChecks checks_;
  const int64_t capacity_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_shm_backend(const BackendOptions& options) {
  auto shm = c10::make_intrusive<c10d::Backend::Options>("shm", options.timeout);
  shm->group_name = options.group_name;
  shm->global_ranks_in_group.assign(options.global_ranks.begin(), options.global_ranks.end());
  return c10::make_intrusive<ShmBackend>(ShmSegment::meet(options), std::move(shm));
}

std::shared_ptr<Presence> shm_presence(const c10d::Backend& backend) {
  const auto* shm = dynamic_cast<const ShmBackend*>(&backend);
  return shm ? shm->presence() : nullptr;
}

std::string break_up_shm(c10d::Backend& backend, const std::string& why) {
  return dynamic_cast<ShmBackend&>(backend).break_up(why);
}

}  // namespace fsdp2::comm
