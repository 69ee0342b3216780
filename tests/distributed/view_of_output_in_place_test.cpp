// pytorch#181832: the caller takes a view of a wrapped module's output and adds to it in place.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::view_of_output_in_place {
namespace {

using torch::Tensor;

struct OuterImpl : torch::nn::Module {
  torch::nn::Linear lin{nullptr};
  Tensor shift;
  OuterImpl() {
    lin = register_module("lin", torch::nn::Linear(4, 1));
    shift = register_parameter("shift", torch::zeros({1}));
  }
};
TORCH_MODULE(Outer);

class ViewOfOutputInPlace : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, ViewOfOutputInPlace, ::testing::Values(1, 2));

TEST_P(ViewOfOutputInPlace, GradientsAreReduced) {
  on_ranks(GetParam(), [](int rank) {
    const double expected = get_world_size() == 1 ? 2.0 : 3.0;
    for (int variant = 0; variant < 16; ++variant) {
      const bool in_place = variant & 1, view = variant & 2, parent = variant & 4;
      FullyShardOptions options;
      options.reshard_after_forward = (variant & 8) != 0;
      Outer outer;
      fully_shard(outer->lin, options);
      if (parent) fully_shard(outer, options);
      for (int step = 0; step < 2; ++step) {
        outer->zero_grad();
        Tensor out = outer->lin(torch::full({2, 4}, rank + 1.0));
        out = view ? out.squeeze(-1) : out.clone().squeeze(-1);
        const Tensor y = torch::ones({2}) + (parent ? outer->shift : torch::zeros({1}));
        if (in_place) {
          out += y;
        } else {
          out = out + y;
        }
        out.sum().backward();
        const auto parameters = outer->lin->named_parameters();
        EXPECT_EQ(difference(full(parameters["weight"].grad()), torch::full({1, 4}, expected)), 0)
            << "variant " << variant;
        EXPECT_EQ(difference(full(parameters["bias"].grad()), torch::full({1}, 2.0)), 0)
            << "variant " << variant;
        EXPECT_NE(error_of([&] { outer->lin->weight.data_ptr(); }), "") << "not sharded again";
      }
    }
  });
}

}  // namespace
}  // namespace fsdp2::testing::view_of_output_in_place
