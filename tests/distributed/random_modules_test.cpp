// Random modules, wrapped and trained at random, against the plain module on the concatenated
// batch. The seed that failed is printed; FSDP2_FUZZ_SEED repeats it.

#include "support/errors.h"
#include "support/fuzz.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::random_modules {
namespace {

using torch::Tensor;
using Step = std::function<Tensor(const Tensor&)>;

/// What later blocks may use again.
struct Reusable {
  std::vector<torch::nn::Linear> layers;  // width to width
  std::vector<Tensor> matrices;           // width by width
};

struct RandomBlockImpl : torch::nn::Module {
  std::vector<Step> steps;

  RandomBlockImpl(Dice& dice, int64_t width, Reusable& reusable) {
    const int count = 1 + dice.upto(3);
    for (int i = 0; i < count; ++i)
      steps.push_back(make_step(dice, width, reusable, std::to_string(i)));
  }
  Tensor forward(Tensor x) {
    for (const Step& step : steps) x = torch::tanh(step(x)) + 0.5 * x;
    return x;
  }

 private:
  Step make_step(Dice& dice, int64_t width, Reusable& reusable, const std::string& id) {
    using namespace torch::nn;
    switch (dice.upto(14)) {
      case 0: {
        Linear up = register_module("up" + id, Linear(width, 2 * width + 1));
        Linear down = register_module("down" + id, Linear(2 * width + 1, width));
        return [=](const Tensor& x) mutable { return down(torch::gelu(up(x))); };
      }
      case 1: {
        LayerNorm norm = register_module("norm" + id, LayerNorm(LayerNormOptions({width})));
        return [=](const Tensor& x) mutable { return norm(x); };
      }
      case 2: {
        Tensor w = register_parameter("w" + id, torch::randn({width, width}));
        reusable.matrices.push_back(w);
        const bool split = dice.one_in(2);
        return [=](const Tensor& x) {
          if (!split) return x.mm(w.t());
          auto parts = w.split({1, width - 1}, 1);
          return x.mm(torch::cat({parts[1], parts[0]}, 1)) + w.view({-1}).narrow(0, 1, width);
        };
      }
      case 3: {
        Tensor row = register_parameter("row" + id, torch::rand({width}));
        Tensor scale = register_parameter("scale" + id, torch::rand({}));
        return [=](const Tensor& x) { return x * row * scale + row.flip(0); };
      }
      case 4: {
        GRUCell cell = register_module("cell" + id, GRUCell(width, width));
        return [=](const Tensor& x) mutable { return cell(x, torch::sin(x)); };
      }
      case 5: {
        MultiheadAttention attention =
            register_module("attention" + id, MultiheadAttention(width, 1));
        return [=](const Tensor& x) mutable {
          Tensor sequence = torch::stack({x, torch::cos(x)});
          return std::get<0>(attention(sequence, sequence, sequence))[0];
        };
      }
      case 6: {
        Conv1d conv = register_module("conv" + id, Conv1d(Conv1dOptions(1, 3, 3).padding(1)));
        return [=](const Tensor& x) mutable { return conv(x.unsqueeze(1)).sum(1); };
      }
      case 7: {
        Embedding embedding = register_module("embedding" + id, Embedding(5, width));
        return [=](const Tensor& x) mutable {
          return x + embedding(x.detach().sum(1).abs().mul(10).to(torch::kLong) % 5);
        };
      }
      case 8: {
        ParameterList list = register_module("list" + id, ParameterList());
        list->append(torch::randn({width}).requires_grad_());
        list->append(torch::randn({width}).requires_grad_());
        return [=](const Tensor& x) mutable { return x * list[0] + list[1]; };
      }
      case 9: {
        Bilinear bilinear = register_module("bilinear" + id, Bilinear(width, width, width));
        return [=](const Tensor& x) mutable { return bilinear(x, torch::sin(x)); };
      }
      case 10: {  // a module used before
        if (reusable.layers.empty()) break;
        auto layer = reusable.layers[static_cast<size_t>(dice.upto(int(reusable.layers.size())))];
        if (dice.one_in(2)) register_module("shared" + id, layer);
        return [=](const Tensor& x) mutable { return layer(x); };
      }
      case 11: {  // a weight used before, under a second name
        if (reusable.matrices.empty()) break;
        Tensor w = reusable.matrices[static_cast<size_t>(dice.upto(int(reusable.matrices.size())))];
        register_parameter("tied" + id, w);
        return [=](const Tensor& x) { return x.mm(w); };
      }
      case 12: {  // a weight reached in another module
        if (reusable.layers.empty()) break;
        auto layer = reusable.layers[static_cast<size_t>(dice.upto(int(reusable.layers.size())))];
        return [=](const Tensor& x) mutable {
          return torch::linear(x, layer->weight.t()) * layer->bias;
        };
      }
      default:
        break;
    }
    torch::nn::Linear layer = register_module("layer" + id, torch::nn::Linear(width, width));
    reusable.layers.push_back(layer);
    return [=](const Tensor& x) mutable { return layer(x); };
  }
};
TORCH_MODULE(RandomBlock);

struct RandomNetImpl : torch::nn::Module {
  int64_t width;
  std::vector<RandomBlock> blocks;
  std::vector<size_t> order;  // in which forward runs them; some twice

  explicit RandomNetImpl(unsigned seed) {
    Dice dice(seed);
    torch::manual_seed(seed);
    width = 2 + dice.upto(6);
    Reusable reusable;
    const auto count = static_cast<size_t>(1 + dice.upto(4));
    for (size_t i = 0; i < count; ++i) {
      blocks.push_back(
          register_module("block" + std::to_string(i), RandomBlock(dice, width, reusable)));
      order.push_back(i);
    }
    if (dice.one_in(3)) order.push_back(static_cast<size_t>(dice.upto(int(count))));
    to(torch::kDouble);
  }
  Tensor forward(Tensor x, int skip = -1) {
    for (size_t i : order) {
      if (static_cast<int>(i) != skip) x = blocks[i]->forward(x);
    }
    return x;
  }
};
TORCH_MODULE(RandomNet);

/// Of one dimension, or with replicas; made once, as every mesh has its own groups.
const DeviceMesh& random_mesh(Dice& dice) {
  static const auto* meshes = [] {
    auto* made = new std::vector<DeviceMesh>();
    const int64_t world = get_world_size();
    made->push_back(init_device_mesh("cpu", {world}));
    for (int64_t replicas : {world, int64_t{2}}) {
      if (world % replicas == 0)
        made->push_back(
            init_device_mesh("cpu", {replicas, world / replicas}, {"replicate", "shard"}));
    }
    return made;
  }();
  return dice.one_in(2) ? meshes->front() : (*meshes)[dice.upto(static_cast<int>(meshes->size()))];
}

FullyShardOptions random_options(Dice& dice, const DeviceMesh& mesh) {
  FullyShardOptions options;
  options.mesh = mesh;
  const int64_t ranks = mesh.size(mesh.ndim() - 1);
  const int choice = dice.upto(4);
  if (choice == 1) options.reshard_after_forward = true;
  if (choice == 2) options.reshard_after_forward = false;
  if (choice == 3) options.reshard_after_forward = ranks % 2 == 0 ? ranks / 2 : ranks;
  if (dice.one_in(4)) options.replicate_below = 8;
  if (dice.one_in(4)) {
    // The last dimension where it can be split evenly.
    options.shard_placement_fn = [ranks](const Tensor& p) -> std::optional<ShardPlacement> {
      if (p.dim() < 2 || p.size(-1) % ranks != 0) return std::nullopt;
      return Shard(-1);
    };
  }
  return options;
}

/// Children before parents; some on their own, some not at all, two blocks as one group at times.
void wrap(RandomNet& net, Dice& dice) {
  const DeviceMesh& mesh = random_mesh(dice);
  for (auto& block : net->blocks) {
    for (const auto& child : block->children()) {
      const bool container = child->as<torch::nn::ParameterListImpl>() != nullptr;
      if (dice.one_in(4) && !container && !is_fsdp(*child))
        fully_shard(child, random_options(dice, mesh));
    }
  }
  if (net->blocks.size() > 2 && dice.one_in(4)) {
    fully_shard(
        std::vector<std::shared_ptr<torch::nn::Module>>{net->blocks[1].ptr(), net->blocks[2].ptr()},
        random_options(dice, mesh));
  }
  for (auto& block : net->blocks) {
    if (!is_fsdp(*block) && dice.one_in(2)) fully_shard(block, random_options(dice, mesh));
  }
  fully_shard(net, random_options(dice, mesh));
}

void freeze(Twins<RandomNet>& twins, Dice& dice, int odds) {
  auto ours = twins.sharded->named_parameters();
  for (const auto& item : twins.plain->named_parameters()) {
    if (!dice.one_in(odds)) continue;
    const bool on = dice.one_in(2);
    item.value().set_requires_grad(on);
    ours[item.key()].set_requires_grad(on);
  }
}

double scaled(const Tensor& ours, const Tensor& expected) {
  const double size = expected.numel() ? expected.detach().abs().max().item<double>() : 0;
  return difference(ours, expected) / (1 + size);
}

void expect_same(Twins<RandomNet>& twins, double bound) {
  const auto ours = twins.sharded->named_parameters();
  const auto plain = twins.plain->named_parameters();
  ASSERT_EQ(ours.size(), plain.size());
  for (const auto& item : plain) {
    const Tensor mine = ours[item.key()];
    EXPECT_LE(scaled(full(mine), item.value()), bound) << item.key();
    ASSERT_EQ(mine.grad().defined(), item.value().grad().defined()) << "gradient of " << item.key();
    if (!mine.grad().defined()) continue;
    EXPECT_LE(scaled(full(mine.grad()), item.value().grad()), bound)
        << "gradient of " << item.key();
  }
}

/// One step of both, chosen by `dice` alike on all ranks.
void train(Twins<RandomNet>& twins, Dice& dice, unsigned seed) {
  const int64_t rows = 1 + dice.upto(3);
  const int skip = dice.one_in(4) ? dice.upto(int(twins.plain->blocks.size())) : -1;
  const bool twice = dice.one_in(3);
  // What comes through the members and what comes through parameters() adds up in another order.
  const bool decay = dice.one_in(4) && get_world_size() > 1;
  auto loss = [&](RandomNet& net, int rank) {
    torch::manual_seed(seed * 10 + rank);
    const Tensor x = torch::randn({rows, net->width}, torch::kDouble);
    Tensor value = net->forward(x, skip).pow(2).mean();
    if (twice) value = value + net->forward(2 * x).sin().mean();
    if (decay) {
      for (const Tensor& p : net->parameters()) {
        if (p.requires_grad()) value = value + p.pow(2).sum() * 0.01;
      }
    }
    return value;
  };
  if (dice.one_in(3)) {
    torch::NoGradGuard no_grad;
    EXPECT_LE(scaled(loss(twins.sharded, 0), loss(twins.plain, 0)), 1e-9) << "evaluation";
  }
  const Tensor probe = loss(twins.plain, 0);
  if (!probe.requires_grad()) return;
  twins.backward(loss);
}

void run_seed(unsigned seed) {
  SCOPED_TRACE("FSDP2_FUZZ_SEED=" + std::to_string(seed) + " at " +
               std::to_string(get_world_size()) + " ranks");
  Dice dice(seed + 1000003);
  Twins<RandomNet> twins(seed);
  freeze(twins, dice, 8);
  try {
    wrap(twins.sharded, dice);
  } catch (const c10::Error& error) {
    // A module shared by two wrapped parents: refused, whichever rank asks.
    EXPECT_THAT(error.what_without_backtrace(), ::testing::HasSubstr("sharded already"));
    return;
  }
  const bool exact = get_world_size() == 1;
  const double bound = exact ? 0 : 1e-9;
  std::array<std::unique_ptr<torch::optim::Optimizer>, 2> optimizers;
  for (size_t i = 0; i < 2; ++i) {
    auto parameters = (*twins.both()[i])->parameters();
    if (exact && seed % 2) {
      optimizers[i] = std::make_unique<torch::optim::AdamW>(parameters, 0.01);
    } else {
      optimizers[i] = std::make_unique<torch::optim::SGD>(
          parameters, torch::optim::SGDOptions(0.01).momentum(0.9));
    }
  }
  const int steps = 2 + dice.upto(3);
  for (int step = 0; step < steps && !::testing::Test::HasFailure(); ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    train(twins, dice, seed + static_cast<unsigned>(step));
    expect_same(twins, bound);
    if (dice.one_in(3)) {
      torch::NoGradGuard no_grad;
      for (auto* net : twins.both()) (*net)->parameters().front().mul_(0.9);
    }
    if (dice.one_in(4)) freeze(twins, dice, 6);
    if (dice.one_in(3)) continue;  // accumulate
    for (auto& optimizer : optimizers) {
      optimizer->step();
      optimizer->zero_grad();
    }
    expect_same(twins, bound);
  }
}

class RandomModules : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, RandomModules, ::testing::Values(1, 2, 3, 4));

TEST_P(RandomModules, EqualThePlainModule) {
  constexpr unsigned kBatch = 12;
  const auto end = std::chrono::steady_clock::now() + fuzz_time();
  unsigned seed = first_seed();
  do {
    on_ranks(
        GetParam(),
        [&](int) {
          for (unsigned i = 0; i < kBatch && !::testing::Test::HasFailure(); ++i)
            run_seed(seed + i);
        },
        std::chrono::seconds(40));
    seed += kBatch;
  } while (std::chrono::steady_clock::now() < end && !::testing::Test::HasFailure());
}

}  // namespace
}  // namespace fsdp2::testing::random_modules
