// Every line of C++ that docs/migration.md quotes, compiled and run; tests/migration.py looks that
// each is here.

#include "support/models.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/training.h"

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

namespace fsdp2::testing::migration {
namespace {

using torch::Tensor;
using Options = FullyShardOptions;

Tensor ids() { return torch::zeros({2, 3}, torch::kLong); }

/// Wraps and takes one step.
void train(Net& model, const Options& options = {}) {
  for (auto& block : *model->blocks) fully_shard(block, options);
  fully_shard(model, options);
  torch::optim::AdamW optimizer(model->parameters());
  model->loss(ids(), ids()).backward();
  optimizer.step();
  optimizer.zero_grad();
}

TEST(Migration, FullyShard) {
  on_ranks(2, [](int) {
    Net model;
    // The loop of every FSDP2 program.
    for (auto& block : *model->blocks) fully_shard(block);
    fully_shard(model);
    torch::optim::AdamW optimizer(model->parameters());
    model->loss(ids(), ids()).backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
    EXPECT_TRUE(is_fsdp(*model));
    FSDPModule controls = as_fsdp(*model);
    EXPECT_EQ(controls.parameter_names().size(), 3u);
  });
}

TEST(Migration, Groups) {
  on_ranks(2, [](int) {
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({4}));
    torch::nn::Linear head(4, 3);
    fully_shard({norm.ptr(), head.ptr()});
    head(norm(torch::ones({2, 4}))).sum().backward();
  });
}

TEST(Migration, Meshes) {
  on_ranks(2, [](int) {
    Net one, two, three, four;
    Options options;
    options.mesh = init_device_mesh("cpu", {get_world_size()});
    train(one, options);
    options.mesh = init_device_mesh("cpu", {1, 2}, {"replicate", "shard"});
    train(two, options);
    const DeviceMesh spmd = init_device_mesh("cpu", {1, 2, 1}, {"replicate", "shard", "tp"});
    options.mesh = spmd[std::vector<std::string>{"replicate", "shard"}];
    train(three, options);
    options.mesh = DeviceMesh::from_group(world_group(), torch::kCPU);
    train(four, options);
  });
}

TEST(Migration, Arguments) {
  on_ranks(2, [](int) {
    Net model;
    Options options;
    options.reshard_after_forward = false;
    options.reshard_after_forward = int64_t{2};
    options.reshard_after_forward = true;
    options.shard_placement_fn = [](const Tensor& p) -> std::optional<ShardPlacement> {
      if (p.dim() > 1 && p.size(1) % 2 == 0) return Shard(1);
      return std::nullopt;
    };
    options.mp_policy.param_dtype = torch::kBFloat16;
    options.mp_policy.reduce_dtype = torch::kFloat32;
    options.mp_policy.cast_forward_inputs = true;
    options.offload_policy = CPUOffloadPolicy{.pin_memory = false};
    train(model, options);
  });
}

TEST(Migration, IgnoredParameters) {
  on_ranks(2, [](int) {
    Net model;
    Options options;
    options.ignored_params = model->blocks[0]->parameters();
    train(model, options);
  });
}

struct CountedAllGather final : AllGather {
  Work operator()(const Tensor& output, const Tensor& input, const ProcessGroup& group) override {
    return all_gather_single(output, input, group);
  }
};
struct CountedReduceScatter final : ReduceScatter {
  Work operator()(const Tensor& output, const Tensor& input, const ProcessGroup& group) override {
    return reduce_scatter_single(output, input, ReduceOp::kSum, group);
  }
};

TEST(Migration, Controls) {
  on_ranks(2, [](int) {
    Net model;
    for (auto& block : *model->blocks) fully_shard(block);
    FSDPModule root = fully_shard(model);
    FSDPModule first = as_fsdp(*model->blocks[0]), second = as_fsdp(*model->blocks[1]);

    root.unshard();
    UnshardHandle handle = root.unshard(/*async_op=*/true);
    handle.wait();
    root.reshard();
    root.set_is_last_backward(true);
    root.set_requires_gradient_sync(false);
    root.set_requires_gradient_sync(true);
    root.set_requires_all_reduce(true);
    root.set_reshard_after_forward(true);
    root.set_reshard_after_backward(true);
    first.set_modules_to_forward_prefetch({second});
    second.set_modules_to_backward_prefetch({first});
    root.set_custom_all_gather(std::make_shared<CountedAllGather>());
    root.set_custom_reduce_scatter(std::make_shared<CountedReduceScatter>());
    root.set_all_reduce_hook([](const Tensor& gradients) { gradients.mul_(1); });
    root.set_gradient_divide_factor(2);
    root.set_reduce_scatter_max_input_buffers(2);
    first.set_unshard_in_backward(true);
    root.reset_iter_state();
    model->loss(ids(), ids()).backward();
    second.set_allocate_memory_from_process_group_for_comm(false);
  });
}

TEST(Migration, Accumulation) {
  on_ranks(2, [](int) {
    Net model;
    for (auto& block : *model->blocks) fully_shard(block);
    FSDPModule root = fully_shard(model);
    for (int micro = 0; micro < 3; ++micro) {
      root.set_requires_gradient_sync(micro == 2);
      (model->loss(ids(), ids()) / 3).backward();
    }
  });
}

TEST(Migration, MetaDevice) {
  on_ranks(2, [](int) {
    Net model = [] {
      MetaDeviceGuard meta;
      return Net();
    }();
    for (auto& block : *model->blocks) fully_shard(block);
    fully_shard(model);
    to_empty(*model, torch::kCPU);
    init_weights(*model, [](torch::nn::Module& m) {
      if (auto* linear = m.as<torch::nn::Linear>()) linear->reset_parameters();
      if (auto* norm = m.as<torch::nn::LayerNorm>()) norm->reset_parameters();
      if (auto* embedding = m.as<torch::nn::Embedding>()) embedding->reset_parameters();
    });
    model->loss(ids(), ids()).backward();
  });
}

TEST(Migration, States) {
  on_ranks(2, [](int) {
    Net model;
    sync_module_states(*model, init_device_mesh("cpu", {get_world_size()}));
    train(model);
    for (const auto& item : model->named_parameters()) {
      Tensor whole = DTensor(item.value()).full_tensor();
      Tensor mine = DTensor(item.value()).to_local();
      EXPECT_LE(mine.numel(), whole.numel());
    }
    FSDPModule root = as_fsdp(*model);
    root.unshard();
    EXPECT_TRUE(model->head->weight.data_ptr<float>() != nullptr);
    root.reshard();
  });
}

TEST(Migration, Checkpoints) {
  const TemporaryFolder folder;
  const std::string path = folder.path("c");
  on_ranks(2, [&](int) {
    Net model;
    train(model);
    torch::optim::AdamW optimizer(model->parameters());
    auto [model_state, optimizer_state] = get_state_dict(*model, optimizer);
    set_state_dict(*model, optimizer, model_state, optimizer_state);
    dcp::StateDict weights = get_model_state_dict(*model);
    set_model_state_dict(*model, weights);
    dcp::StateDict moments = get_optimizer_state_dict(*model, optimizer);
    weights = get_model_state_dict(*model, {.full_state_dict = true, .cpu_offload = true});
    set_model_state_dict(*model, weights, {.full_state_dict = true, .broadcast_from_rank0 = true});
    dcp::StateDict state = {{"optim", moments}};
    state["train"] = training_state(model.ptr(), optimizer);
    dcp::save(state, path);
    dcp::AsyncSave saving = dcp::async_save(state, path);
    saving.wait();
    dcp::LoadReport report = dcp::load(state, path);
    report = dcp::load(state, path, {.allow_partial = true});
    EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
    dcp::StateDict everything = dcp::load_everything(path);
    EXPECT_EQ(everything.keys(), state.keys());
    dcp::save(state, path, {.threads = 2});
    dcp::finish_async_saves();
  });
}

TEST(Migration, HooksOnGradients) {
  on_ranks(2, [](int) {
    Net model;
    for (auto& block : *model->blocks) fully_shard(block);
    fully_shard(model);
    for (Tensor& p : model->parameters())
      p.register_hook([](Tensor gradient) { return gradient * 2; });
    model->loss(ids(), ids()).backward();
  });
}

TEST(Migration, Boundaries) {
  on_ranks(2, [](int) {
    using HookedBlock = HookedHolder<BlockImpl>;
    HookedBlock block(4);
    int calls = 0;
    block->register_forward_hook([&](torch::nn::Module&, Values&, Values&) { ++calls; });
    Options options;
    options.mp_policy.output_dtype = torch::kFloat64;
    auto sharded = fully_shard(block, options);
    EXPECT_EQ(sharded(torch::ones({2, 4})).scalar_type(), torch::kFloat64);
    EXPECT_EQ(calls, 1);
  });
}

TEST(Migration, ActivationCheckpointing) {
  on_ranks(2, [](int) {
    Net model;
    for (auto& block : *model->blocks) fully_shard(block);
    fully_shard(model);
    Block first(6);
    auto second = checkpoint_wrapper(Block(6));
    fully_shard(first);
    fully_shard(second);
    Tensor x = model->embedding(ids());
    x = checkpoint(first, x);
    x = checkpoint(CheckpointOptions{.op_list = {"aten::addmm"}}, first, x);
    CheckpointOptions selective;
    selective.policy_fn = [](const SelectiveCheckpointContext& context) {
      return context.op.name() == "aten::addmm" ? CheckpointPolicy::kMustSave
                                                : CheckpointPolicy::kPreferRecompute;
    };
    x = checkpoint(selective, first, x);
    second->forward(x).sum().backward();
  });
}

TEST(Migration, Optimizers) {
  on_ranks(2, [](int) {
    Net model;
    for (auto& block : *model->blocks) fully_shard(block);
    fully_shard(model);
    optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-3));
    GradScaler scaler;
    scaler.scale(model->loss(ids(), ids())).backward();
    scaler.unscale_(optimizer);
    clip_grad_norm_(model->parameters(), 1.0);
    scaler.step(optimizer);
    scaler.update();
  });
}

TEST(Migration, DistributedDataParallel) {
  on_ranks(2, [](int) {
    Net model;
    ReplicateOptions ddp;
    ddp.mesh = init_device_mesh("cpu", {get_world_size()});
    ddp.bucket_cap_mb = 25;
    ddp.static_graph = false;
    ddp.gradient_as_bucket_view = true;
    ddp.find_unused_parameters = true;
    ddp.broadcast_buffers = true;
    ddp.init_sync = true;
    ddp.ignored_parameters = {"head.bias"};
    ReplicatedModule replica = replicate(model, ddp);
    {
      auto accumulating = replica.no_sync();
      model->loss(ids(), ids()).backward();
    }
    model->loss(ids(), ids()).backward();
    replica.sync_buffers();
  });
}

TEST(Migration, InPlaceOfDistributedDataParallel) {
  on_ranks(2, [](int) {
    Net model;
    Options options;
    options.mesh = init_device_mesh("cpu", {get_world_size(), 1}, {"replicate", "shard"});
    sync_module_states(*model, options.mesh);
    train(model, options);
  });
}

}  // namespace
}  // namespace fsdp2::testing::migration
