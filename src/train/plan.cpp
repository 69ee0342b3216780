#include "train/plan.h"

#include "train/world.h"

#include <fsdp2/placement.h>

#include <torch/types.h>

#include <algorithm>
#include <numeric>

namespace fsdp2::train {
namespace {

constexpr int64_t kShardBytes = 4;  // shards, their gradients and the optimizer's state are fp32

struct Sizes {
  std::vector<std::vector<int64_t>> block, root;
  explicit Sizes(const LlamaConfig& m) {
    const int64_t q = m.heads * m.head_dim(), kv = m.kv_heads * m.head_dim();
    block = {{m.dim}, {q, m.dim},     {kv, m.dim},    {kv, m.dim},   {m.dim, q},
             {m.dim}, {m.ffn, m.dim}, {m.dim, m.ffn}, {m.ffn, m.dim}};
    root = {{m.vocab, m.dim}, {m.dim}};
    if (!m.tied) root.push_back({m.vocab, m.dim});
  }
};

/// Elements of one parameter group: whole, and of the largest part.
struct Group {
  int64_t whole = 0, part = 0, largest_part = 0;
  Group(const std::vector<std::vector<int64_t>>& parameters, int64_t ranks) {
    for (const auto& sizes : parameters) {
      const int64_t rest =
          std::accumulate(sizes.begin() + 1, sizes.end(), int64_t{1}, std::multiplies<>());
      const int64_t chunk = chunk_of(sizes[0], ranks, 0).length * rest;
      whole += sizes[0] * rest;
      part += chunk;
      largest_part = std::max(largest_part, chunk);
    }
  }
};

class Planner {
 public:
  explicit Planner(const PlanOptions& options)
      : options_(options),
        model_(options.model),
        block_(Sizes(model_).block, options.shard),
        kept_(Sizes(model_).block, keeps_parts() ? options.reshard_to : options.shard),
        root_(Sizes(model_).root, options.shard),
        compute_(size_of(options.param_dtype)),
        reduce_(size_of(options.reduce_dtype)) {}

  MemoryPlan plan() {
    MemoryPlan plan;
    plan.parameters = model_.layers * block_.whole + root_.whole;
    plan.shard_parameters = model_.layers * block_.part + root_.part;
    plan.largest_group = std::max(block_.whole, root_.whole);
    plan.moments = {between_steps(),   root_gather(),     loss(),          head_backward(),
                    blocks_backward(), end_of_backward(), optimizer_step()};
    return plan;
  }

 private:
  static int64_t size_of(const std::string& dtype) {
    return static_cast<int64_t>(c10::elementSize(dtype_of(dtype)));
  }
  bool alone() const { return options_.shard * options_.replicate == 1; }
  bool keeps_parts() const {
    return options_.reshard_to > 1 && options_.reshard_to < options_.shard;
  }
  bool reshards() const { return options_.reshard_after_forward && options_.reshard_to != 1; }

  int64_t moments_a_parameter() const {
    if (options_.optimizer == "sgd") return 0;
    return options_.optimizer == "momentum" ? 1 : 2;
  }

  Moment moment(const std::string& name) const {
    Moment moment;
    moment.name = name;
    moment.shards = (model_.layers * block_.part + root_.part) * kShardBytes;
    moment.optimizer = options_.nvme_moments ? 0 : moment.shards * moments_a_parameter();
    return moment;
  }

  // Parameters.
  int64_t gathered_blocks() const { return reshards() ? 1 : model_.layers; }
  int64_t gathered(int64_t numbers) const {
    // A shard that is whole, in the right dtype and place, serves as it is.
    const bool serves = options_.shard == 1 && compute_ == kShardBytes && !options_.offload;
    return serves ? 0 : numbers * compute_;
  }
  int64_t gathered() const { return gathered(root_.whole + gathered_blocks() * block_.whole); }
  /// Own part and all parts.
  int64_t buffers_of(const Group& group, int64_t ranks) const {
    return ranks == 1 ? 0 : group.part * (ranks + 1) * compute_;
  }
  /// Of a block that is gathered ahead in backward.
  int64_t gather_buffers() const {
    if (!reshards() || model_.layers == 1) return 0;
    return buffers_of(kept_, keeps_parts() ? options_.reshard_to : options_.shard);
  }
  int64_t kept_parts(int64_t blocks) const {
    return keeps_parts() ? blocks * kept_.part * compute_ : 0;
  }

  // Gradients.
  int64_t reduced(const Group& group) const { return group.part * kShardBytes; }
  int64_t reduce_input(const Group& group) const {
    if (options_.shard == 1) return 0;  // what is reduced becomes the result
    const int64_t copies = options_.backend == "gloo" ? 2 : 1;
    return copies * group.part * options_.shard * reduce_;
  }

  // Activations.
  int64_t tokens() const { return options_.batch * model_.seq; }
  /// What autograd keeps of a norm: its input and the normalized input in fp32, the result.
  int64_t norm_saved() const { return model_.dim * (int64_t{2} * 4 + compute_) + 4; }
  int64_t block_saved() const {
    const int64_t attention = 4 * model_.dim * compute_ + model_.heads * 4;
    const int64_t feed_forward = 4 * model_.ffn * compute_;
    return tokens() * (2 * norm_saved() + attention + feed_forward);
  }
  int64_t block_input() const { return tokens() * model_.dim * compute_; }
  /// Of blocks whose backward is still to come.
  int64_t blocks_saved(int64_t blocks) const {
    return blocks * (options_.checkpoint ? block_input() : block_saved());
  }
  /// Of the block that backward is in: what was kept of it, and what is computed again.
  int64_t block_in_use() const {
    // The first norm keeps the input itself, if that is in fp32.
    return block_saved() + (options_.checkpoint && compute_ < 4 ? block_input() : 0);
  }
  int64_t all_saved() const { return blocks_saved(model_.layers) + tokens() * norm_saved(); }
  int64_t logits(int64_t element) const { return tokens() * model_.vocab * element; }

  Moment between_steps() const { return moment("between steps"); }

  /// The largest group, usually: nothing is gathered ahead of it.
  Moment root_gather() const {
    Moment at = moment("gather of the root");
    at.gathered = gathered(root_.whole);
    at.gather_buffers = buffers_of(root_, options_.shard);
    return at;
  }

  /// Log-probabilities and, on the way back, the gradients of them and of the logits.
  Moment loss() const {
    Moment at = moment("loss");
    at.gathered = gathered();
    at.kept_parts = kept_parts(model_.layers - 1);
    at.activations = all_saved() + 3 * logits(4);
    return at;
  }

  Moment head_backward() const {
    Moment at = moment("backward of the head");
    at.gathered = gathered();
    at.gather_buffers = gather_buffers();
    at.kept_parts = kept_parts(model_.layers - 1);
    at.whole_gradients = model_.vocab * model_.dim * compute_;
    at.activations = all_saved() + logits(4) + (compute_ < 4 ? logits(compute_) : 0);
    return at;
  }

  /// The blocks run from the last to the first: activations go, gradients come.
  Moment blocks_backward() const {
    Moment most;
    for (int64_t left = model_.layers - 1; left >= 0; --left) {
      for (const Moment& at : {in_block(left), block_reduced(left)}) {
        if (at.total() > most.total()) most = at;
      }
    }
    return most;
  }

  Moment after_blocks(int64_t left) const {
    Moment at = moment("backward of the blocks");
    at.gathered = gathered();
    at.gather_buffers = left > 0 ? gather_buffers() : 0;
    at.kept_parts = kept_parts(left);
    at.gradients = (model_.layers - 1 - left) * reduced(block_);
    at.whole_gradients = (model_.vocab * model_.dim + block_.whole) * compute_;
    return at;
  }
  /// `left` blocks are still to come after this one.
  Moment in_block(int64_t left) const {
    Moment at = after_blocks(left);
    if (left < model_.layers - 1) at.reduce_buffers = reduce_input(block_);
    at.activations = blocks_saved(left) + block_in_use() + tokens() * 4 * model_.dim * compute_;
    return at;
  }
  Moment block_reduced(int64_t left) const {
    Moment at = after_blocks(left);
    at.gradients += alone() ? 0 : reduced(block_);
    at.reduce_buffers = reduce_input(block_);
    at.activations = blocks_saved(left) + tokens() * 2 * model_.dim * compute_;
    return at;
  }

  Moment end_of_backward() const {
    Moment at = moment("last reduction");
    at.gathered = gathered();
    at.gradients = model_.layers * reduced(block_) + (alone() ? 0 : reduced(root_));
    at.whole_gradients = root_.whole * compute_;
    at.reduce_buffers = reduce_input(root_);
    return at;
  }

  Moment optimizer_step() const {
    Moment at = moment("optimizer step");
    at.gradients = model_.layers * reduced(block_) + reduced(root_);
    const int64_t largest = std::max(block_.largest_part, root_.largest_part) * kShardBytes;
    if (options_.nvme_moments) {
      at.optimizer = 2 * moments_a_parameter() * largest;  // one parameter's, and the next one's
    } else {
      at.activations = optimizer_temporaries() * largest;
    }
    return at;
  }
  int64_t optimizer_temporaries() const { return options_.optimizer.starts_with("adam") ? 2 : 1; }

  const PlanOptions& options_;
  const LlamaConfig& model_;
  const Group block_, kept_, root_;
  const int64_t compute_, reduce_;
};

}  // namespace

int64_t Moment::total() const {
  return shards + gradients + optimizer + gathered + gather_buffers + kept_parts + whole_gradients +
         reduce_buffers + activations;
}

const Moment& MemoryPlan::peak() const {
  return *std::max_element(moments.begin(), moments.end(),
                           [](const Moment& a, const Moment& b) { return a.total() < b.total(); });
}

void check(const PlanOptions& options) {
  const std::pair<const char*, int64_t> counts[] = {
      {"--replicate", options.replicate}, {"--shard", options.shard}, {"--batch", options.batch}};
  for (const auto& [name, value] : counts) {
    TORCH_CHECK_VALUE(value >= 1, name, " must be at least 1, got ", value);
  }
  TORCH_CHECK_VALUE(options.reshard_to >= 0 &&
                        (options.reshard_to == 0 || options.shard % options.reshard_to == 0),
                    "--reshard-to ", options.reshard_to, " does not divide the number of shards, ",
                    options.shard);
  TORCH_CHECK_VALUE(!options.nvme_moments || options.optimizer == "adamw",
                    "--nvme-moments is for --optimizer adamw, not for ", options.optimizer);
  TORCH_CHECK_VALUE(options.backend == "gloo" || options.backend == "nccl", "there is no backend '",
                    options.backend, "': use gloo or nccl");
  const std::vector<std::string> optimizers = {"adamw", "adam", "momentum", "sgd"};
  TORCH_CHECK_VALUE(std::count(optimizers.begin(), optimizers.end(), options.optimizer) == 1,
                    "there is no optimizer '", options.optimizer,
                    "': use adamw, adam, momentum (SGD with it) or sgd");
}

MemoryPlan plan_memory(const PlanOptions& options) {
  check(options);
  return Planner(options).plan();
}

}  // namespace fsdp2::train
