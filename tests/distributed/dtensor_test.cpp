// What a DTensor is to its user: crossing to and from local parts, aliases, printing, errors.
#include "dtensor/dtensor_impl.h"
#include "support/errors.h"
#include "support/ranks.h"

#include <fsdp2/dtensor.h>

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <memory>
#include <sstream>
#include <vector>

namespace fsdp2 {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using torch::Tensor;

TEST(DTensor, IsATensorOfTheGlobalSize) {
  testing::on_ranks(2, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const Tensor tensor = chunk_tensor(torch::arange(15).view({5, 3}), mesh, {Shard(0)});
    EXPECT_TRUE(is_dtensor(tensor));
    EXPECT_FALSE(is_dtensor(torch::ones({1})));
    EXPECT_FALSE(is_dtensor(Tensor()));
    EXPECT_EQ(tensor.sizes(), torch::IntArrayRef({5, 3}));
    EXPECT_EQ(tensor.strides(), torch::IntArrayRef({3, 1}));
    EXPECT_EQ(tensor.numel(), 15);
    EXPECT_EQ(tensor.scalar_type(), torch::kLong);
    EXPECT_TRUE(tensor.is_contiguous());
    EXPECT_TRUE(tensor.device().is_cpu());
    const DTensor typed(tensor);
    EXPECT_EQ(typed.device_mesh(), mesh);
    EXPECT_EQ(typed.placements(), Placements{Shard(0)});
    EXPECT_EQ(typed.to_local().size(0), rank == 0 ? 3 : 2);
    EXPECT_THAT(error_of([] { DTensor{torch::ones({2})}; }), HasSubstr("plain tensor"));
    EXPECT_THAT(error_of([] { DTensor{Tensor()}; }), HasSubstr("undefined"));
  });
}

TEST(DTensor, DataAccessSaysWhatToDo) {
  testing::on_ranks(1, [](int) {
    const Tensor tensor =
        chunk_tensor(torch::ones({2, 2}), init_device_mesh("cpu", {1}), {Shard(0)});
    EXPECT_THAT(error_of([&] { tensor.storage(); }), HasSubstr("to_local()"));
    EXPECT_NE(error_of([&] { tensor.data_ptr<float>(); }), "");
    EXPECT_NE(error_of([&] { (void)tensor.accessor<float, 2>()[0][0]; }), "");
    EXPECT_NE(error_of([&] {
                std::ostringstream out;
                out << tensor;
              }),
              "");
    std::ostringstream out;
    out << DTensor(tensor);
    EXPECT_THAT(out.str(), AllOf(HasSubstr("DTensor(local_tensor="), HasSubstr("device_mesh="),
                                 HasSubstr("placements=[Shard(dim=0)]")));
    EXPECT_THAT(tensor.toString(), HasSubstr("Float"));
  });
}

TEST(FromLocal, GathersUnevenSizes) {
  testing::on_ranks(4, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {4});
    const Tensor local = torch::full({rank < 3 ? 3 : 1, 2}, rank);
    for (const bool given : {true, false}) {
      const auto size = given ? std::optional<std::vector<int64_t>>({10, 2}) : std::nullopt;
      const DTensor made = DTensor::from_local(local, mesh, {Shard(0)}, size);
      EXPECT_EQ(made.sizes(), torch::IntArrayRef({10, 2}));
      EXPECT_EQ(made.full_tensor().sum().item<int64_t>(), 2 * (3 + 6 + 3));
    }
    EXPECT_EQ(DTensor::from_local(local, mesh, {Shard(-2)}).placements(), Placements{Shard(0)});
  });
  testing::on_ranks(4, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2});
    const Tensor whole = torch::arange(21).view({7, 3});
    for (const Placements& placements :
         {Placements{Shard(0), Shard(0)}, {Shard(0), Shard(1)}, {Replicate(), Shard(1)}}) {
      const DTensor made = chunk_tensor(whole, mesh, placements);
      const DTensor again = DTensor::from_local(made.to_local(), mesh, placements);
      EXPECT_EQ(again.sizes(), whole.sizes());
      EXPECT_TRUE(torch::equal(again.full_tensor(), whole));
    }
  });
}

TEST(FromLocal, UnevenPartsAreOneTensor) {
  testing::on_ranks(4, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {4});
    const Tensor whole = torch::arange(20).view({10, 2}).to(torch::kFloat);
    const Tensor local = whole.narrow(0, 3 * rank, rank < 3 ? 3 : 1).clone();
    const DTensor made = DTensor::from_local(local, mesh, {Shard(0)});
    const auto same = [](const Tensor& result, const Tensor& expected) {
      EXPECT_EQ(result.sizes(), expected.sizes());
      EXPECT_TRUE(torch::allclose(DTensor(result).full_tensor(), expected)) << expected;
    };
    same(made.sum(), whole.sum());
    same(made.sum(0), whole.sum(0));
    same(made.max(), whole.max());
    same(made.min(), whole.min());
    same(made.norm(), whole.norm());
    same(made.norm(1), whole.norm(1));
    same(made.mean(), whole.mean());
    same(made.mean(0), whole.mean(0));
    same(made.std(), whole.std());
    same(made.view({10, 1, 2}), whole.view({10, 1, 2}));
    same(made.view({5, 4}), whole.view({5, 4}));
    same(made.view(-1), whole.view(-1));
    same(made.t(), whole.t());
    same(made[9], whole[9]);
    made.mul_(2);
    same(made, whole * 2);
  });
  testing::on_ranks(4, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {4});
    const Tensor whole = torch::arange(96).view({12, 8});
    const DTensor parts = chunk_tensor(whole, mesh, {Shard(1)});
    EXPECT_TRUE(torch::equal(DTensor(parts.view({16, 6})).full_tensor(), whole.view({16, 6})));
    EXPECT_EQ(DTensor(parts.view({3, 4, 8})).placements(), Placements{Shard(2)});
  });
}

TEST(FromLocal, WrongSizesNameTheRank) {
  testing::on_ranks(4, [](int rank) {
    const DeviceMesh mesh = init_device_mesh("cpu", {4});
    const Tensor local = torch::zeros({2 + rank, 1});
    EXPECT_THAT(
        error_of([&] { DTensor::from_local(local, mesh, {Shard(0)}); }),
        AllOf(HasSubstr("[14, 1]"), HasSubstr("rank 0"), HasSubstr("[4, 1]"), HasSubstr("[2, 1]")));
    EXPECT_THAT(
        error_of([&] {
          DTensor::from_local(torch::zeros({5}), mesh, {Shard(0)}, std::vector<int64_t>{8});
        }),
        AllOf(HasSubstr("rank " + std::to_string(rank)), HasSubstr("[5]"), HasSubstr("[2]")));
    EXPECT_THAT(error_of([&] {
                  DTensor::from_local(torch::zeros({1 + (rank == 2)}), mesh, {Replicate()});
                }),
                AllOf(HasSubstr("rank 2"), HasSubstr("[2]")));
    EXPECT_THAT(error_of([&] {
                  DTensor::from_local(rank == 1 ? torch::zeros({1}) : torch::zeros({1, 1}), mesh,
                                      {Shard(0)});
                }),
                HasSubstr("rank 1"));
  });
}

TEST(DTensor, AliasesShareTheLocalPartAndTheObserver) {
  struct Counter : WriteObserver {
    void before_write() override { ++count; }
    int count = 0;
  };
  testing::on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    Tensor tensor = chunk_tensor(torch::zeros({5, 2}), mesh, {Shard(0)}).requires_grad_();
    const auto counter = std::make_shared<Counter>();
    set_write_observer(tensor, counter);
    int expected = 0;
    tensor.detach().add_(1);
    EXPECT_EQ(counter->count, ++expected);
    tensor.data().mul_(2);
    EXPECT_EQ(counter->count, ++expected);
    {
      torch::NoGradGuard no_grad;
      tensor.copy_(torch::full({5, 2}, 3));
      EXPECT_EQ(counter->count, ++expected);
      tensor.t().select(0, 0).fill_(4);
      EXPECT_EQ(counter->count, ++expected);
      torch::_foreach_add_({tensor, tensor.detach()}, 1);
      EXPECT_EQ(counter->count, expected += 2);
      torch::add_out(tensor, tensor.detach(), tensor.detach());
      EXPECT_EQ(counter->count, ++expected);
      tensor.uniform_();
      EXPECT_EQ(counter->count, ++expected);
      tensor.set_(torch::full({5, 2}, 2.0f));
      EXPECT_EQ(counter->count, ++expected);
      tensor.set_data(torch::optional<Tensor>(tensor * 1).value());
      EXPECT_EQ(counter->count, ++expected);
    }
    tensor.data().add(1).mul(2).clone().zero_();
    tensor.detach().norm().item();
    EXPECT_EQ(counter->count, expected);
    EXPECT_TRUE(torch::equal(DTensor(tensor).full_tensor(), torch::full({5, 2}, 2.0f)));
    const Tensor& local = local_part(tensor);
    EXPECT_TRUE(local_part(tensor.detach()).is_alias_of(local));
    EXPECT_TRUE(DTensor(tensor).to_local().is_alias_of(local));
    const auto version = local._version();
    DTensor(tensor.detach()).to_local().add_(1);
    EXPECT_EQ(local._version(), version + 1);
    EXPECT_THAT(error_of([&] { tensor.set_data(tensor.detach().to(torch::kDouble)); }),
                HasSubstr("before fully_shard"));
  });
}

TEST(DTensor, ModuleConversionsWork) {
  testing::on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    struct Net : torch::nn::Module {
      explicit Net(const Tensor& parameter) { register_parameter("w", parameter); }
    } net(chunk_tensor(torch::ones({3, 2}), mesh, {Shard(0)}));
    net.to(torch::kDouble);
    const Tensor parameter = net.parameters()[0];
    EXPECT_EQ(parameter.scalar_type(), torch::kDouble);
    EXPECT_EQ(local_part(parameter).scalar_type(), torch::kDouble);
    EXPECT_TRUE(is_dtensor(parameter) && parameter.requires_grad());
    parameter.mutable_grad() = torch::ones_like(parameter);
    net.zero_grad(false);
    EXPECT_EQ(DTensor(parameter.grad()).full_tensor().sum().item<double>(), 0);
    net.zero_grad();
    EXPECT_FALSE(parameter.grad().defined());
    EXPECT_THROW(parameter.set_data(torch::ones({2, 3}, torch::kDouble)), c10::Error);
  });
}

TEST(DTensor, LoadsAWholeFileIntoShards) {
  testing::on_ranks(3, [](int) {
    torch::manual_seed(5);
    const DeviceMesh mesh = init_device_mesh("cpu", {3});
    const torch::nn::Linear source(4, 7);
    std::stringstream file;
    torch::save(source, file);
    struct Shards : torch::nn::Module {
      explicit Shards(const DeviceMesh& mesh) {
        register_parameter("weight", chunk_tensor(torch::zeros({7, 4}), mesh, {Shard(0)}));
        register_parameter("bias", chunk_tensor(torch::zeros({7}), mesh, {Shard(0)}));
      }
    };
    auto shards = std::make_shared<Shards>(mesh);
    torch::load(shards, file);
    for (const auto& item : shards->named_parameters()) {
      EXPECT_TRUE(is_dtensor(item.value()) && item.value().requires_grad());
      EXPECT_TRUE(torch::equal(DTensor(item.value()).full_tensor(),
                               source->named_parameters()[item.key()]));
    }
  });
}

TEST(DTensor, InferenceModeAndNoGrad) {
  testing::on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const Tensor parameter = chunk_tensor(torch::ones({3}), mesh, {Shard(0)}).requires_grad_();
    Tensor made;
    {
      torch::InferenceMode inference;
      EXPECT_EQ((parameter * 2).sum().item<float>(), 6);
      made = chunk_tensor(torch::ones({3}), mesh, {Shard(0)});
      made.add_(parameter);
      EXPECT_EQ(made.norm().item<float>(), std::sqrt(12.0f));
      EXPECT_TRUE(torch::equal(DTensor(made).full_tensor(), torch::full({3}, 2.0f)));
    }
    EXPECT_EQ((made + 1).sum().item<float>(), 9);
    torch::NoGradGuard no_grad;
    EXPECT_FALSE((parameter * 2).requires_grad());
    EXPECT_FALSE(DTensor(parameter).full_tensor().requires_grad());
  });
}

}  // namespace
}  // namespace fsdp2
