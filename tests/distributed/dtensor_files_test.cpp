// torch::load, torch::save, clone and printing of DTensors: right, or an error that names what to
// use.
#include "support/errors.h"
#include "support/ranks.h"
#include "support/training.h"
#include "support/twins.h"

#include <fsdp2/fsdp2.h>

#include <torch/torch.h>

#include <functional>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sstream>
#include <vector>

namespace fsdp2::testing::dtensor_files {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using torch::Tensor;

TEST(DTensorFiles, AWholeModuleLoadsIntoAWrappedOne) {
  for (const int world : {1, 2, 3, 4}) {
    on_ranks(world, [](int) {
      Twins<TwoLinear> twins;
      {
        torch::NoGradGuard no_grad;
        for (const Tensor& p : twins.plain->parameters()) p.normal_();
      }
      std::stringstream file;
      torch::save(twins.plain, file);
      wrap_layers(twins.sharded, /*apart=*/true);
      const Tensor x = torch::ones({2, 5});
      twins.sharded->forward(x);
      torch::load(twins.sharded, file);
      twins.expect_same(0, false);
      EXPECT_LE(difference(twins.sharded->forward(x), twins.plain->forward(x)), 1e-6)
          << "forward used what was gathered before";
      for (const Tensor& p : twins.sharded->parameters()) {
        EXPECT_TRUE(is_dtensor(p) && p.requires_grad() && p.is_leaf());
      }
    });
  }
}

TEST(DTensorFiles, AWholeTensorLoadsIntoItsLayout) {
  on_ranks(3, [](int) {
    torch::manual_seed(4);
    const DeviceMesh mesh = init_device_mesh("cpu", {3});
    const Tensor whole = torch::randn({7, 4});
    for (const Placement& placement : {Shard(0), Shard(1), Replicate()}) {
      std::stringstream file;
      torch::save(chunk_tensor(whole, mesh, {Replicate()}).full_tensor(), file);
      Tensor read;
      torch::load(read, file);
      const Tensor part = chunk_tensor(torch::zeros({7, 4}), mesh, {placement});
      part.set_(read);
      EXPECT_EQ(difference(full(part), read), 0);
      EXPECT_EQ(DTensor(part).placements(), Placements{placement});
    }
  });
}

TEST(DTensorFiles, WrongSizesAreNamed) {
  for (const int world : {1, 2}) {
    on_ranks(world, [](int) {
      const torch::nn::Linear source(4, 6);
      std::stringstream file;
      torch::save(source, file);
      torch::nn::Linear module(4, 7);
      fully_shard(module);
      const Tensor before = full(module->parameters()[0]);
      EXPECT_THAT(error_of([&] { torch::load(module, file); }),
                  AllOf(HasSubstr("aten::set_"), HasSubstr("[6, 4]"), HasSubstr("[7, 4]")));
      EXPECT_EQ(difference(full(module->parameters()[0]), before), 0);

      const DeviceMesh mesh = init_device_mesh("cpu", {get_world_size()});
      const Tensor part = chunk_tensor(torch::ones({7, 4}), mesh, {Shard(0)});
      Tensor plain = torch::zeros({7, 4});
      const std::vector<std::function<void()>> refused = {
          [&] { part.resize_({3, 4}); },
          [&] { part.resize_({7, 4}); },
          [&] { part.resize_as_(torch::ones({2})); },
          [&] { part.set_(torch::ones({4, 7})); },
          [&] { part.set_(); },
          [&] { part.copy_(torch::ones({4})); },
          [&] { part.t_(); },
          [&] { part.unsqueeze_(0); },
          [&] { plain.set_(part); },
          [&] { chunk_tensor(plain, mesh, {Replicate()}).resize_({2}); },
      };
      for (size_t i = 0; i < refused.size(); ++i) {
        EXPECT_THAT(error_of(refused[i]),
                    AllOf(HasSubstr("aten::"), HasSubstr("full_tensor()"), HasSubstr("[7, 4]")))
            << i;
      }
      EXPECT_EQ(difference(full(part), torch::ones({7, 4})), 0);
      EXPECT_EQ(part.sizes(), plain.sizes());
    });
  }
}

TEST(DTensorFiles, ALocalPartIsNotTheWhole) {
  on_ranks(2, [](int) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const Tensor part = chunk_tensor(torch::ones({7, 4}), mesh, {Shard(0)});
    const Tensor local = torch::zeros_like(DTensor(part).to_local());
    for (const auto& run :
         std::vector<std::function<void()>>{[&] { part.copy_(local); }, [&] { part.set_(local); },
                                            [&] { part.set_data(local); }}) {
      EXPECT_THAT(error_of(run), AllOf(HasSubstr("[7, 4]"), HasSubstr("from_local")));
    }
    EXPECT_EQ(difference(full(part), torch::ones({7, 4})), 0);
  });
}

TEST(DTensorFiles, SavingCloningAndPrintingNameWhatToUse) {
  for (const int world : {1, 2}) {
    on_ranks(world, [](int) {
      torch::nn::Linear module(3, 5);
      fully_shard(module);
      const Tensor part = module->parameters()[0];
      torch::optim::Adam optimizer(module->parameters());
      part.mutable_grad() = torch::ones_like(part);
      optimizer.step();
      const auto print = [](const Tensor& tensor) {
        std::ostringstream out;
        out << tensor;
      };
      std::ostringstream file;
      EXPECT_THAT(error_of([&] { torch::save(part, file); }), HasSubstr("full_tensor()"));
      EXPECT_THAT(error_of([&] { torch::save(optimizer, file); }), HasSubstr("full_tensor()"));
      EXPECT_THAT(error_of([&] { module->clone(); }), HasSubstr("full_tensor()"));
      EXPECT_THAT(error_of([&] { torch::nn::Linear(3, 5)->weight.set_data(part); }),
                  AllOf(HasSubstr("set_data"), HasSubstr("full_tensor()")));
      EXPECT_THAT(error_of([&] { print(part); }), HasSubstr("to_string()"));
      EXPECT_THAT(error_of([&] { print(part.to(torch::kDouble)); }), HasSubstr("to_string()"));
      EXPECT_THAT(error_of([&] { print(part.sum()); }), HasSubstr("to_string()"));
      std::ostringstream text;
      text << DTensor(part.sum()) << DTensor(part);
      EXPECT_THAT(text.str(), HasSubstr("DTensor(local_tensor="));
      EXPECT_THAT(error_of([&] { torch::save(module, file); }), HasSubstr("full_tensor()"));
    });
  }
}

TEST(DTensorFiles, OptimizerStateIsNotReadFromAFile) {
  on_ranks(2, [](int) {
    const Tensor plain = torch::ones({5, 3}).requires_grad_();
    torch::optim::Adam saved({plain});
    plain.mutable_grad() = torch::ones({5, 3});
    saved.step();
    std::stringstream file;
    torch::save(saved, file);
    const Tensor part = chunk_tensor(torch::ones({5, 3}), init_device_mesh("cpu", {2}), {Shard(0)})
                            .requires_grad_();
    torch::optim::Adam optimizer({part});
    torch::load(optimizer, file);  // keeps the moments as they are in the file: whole
    part.mutable_grad() =
        chunk_tensor(torch::ones({5, 3}), DTensor(part).device_mesh(), {Shard(0)});
    // Whole moments would be written from shards.
    EXPECT_THAT(error_of([&] { optimizer.step(); }),
                AllOf(HasSubstr("aten::"), HasSubstr("full_tensor()")));
    EXPECT_EQ(difference(full(part), torch::ones({5, 3})), 0);
  });
}

}  // namespace
}  // namespace fsdp2::testing::dtensor_files
