// Code that reads parameters from the registry in forward gets shards: its numbers are right, or it
// is an error; never a computation on this rank's part.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/twins.h"

namespace fsdp2::testing::registry_reads {
namespace {

using torch::Tensor;

class RegistryReads : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, RegistryReads, ::testing::Values(1, 2, 3));

struct ReaderImpl : torch::nn::Module {
  using Forward = std::function<Tensor(torch::nn::Module&, const Tensor&)>;
  torch::nn::Linear layer{nullptr};
  ReaderImpl() { layer = register_module("layer", torch::nn::Linear(5, 5)); }
};
TORCH_MODULE(Reader);

Tensor input(int rank) {
  torch::manual_seed(100 + rank);
  return torch::randn({5, 5});
}

void expect_right_or_refused(const char* what, const ReaderImpl::Forward& forward) {
  SCOPED_TRACE(what);
  Twins<Reader> twins;
  fully_shard(twins.sharded);
  auto loss = [&](Reader& m, int rank) { return forward(*m->layer, input(rank)).pow(2).sum(); };
  const std::string error = error_of([&] {
    Tensor value = loss(twins.sharded, get_rank());
    if (is_dtensor(value)) value = DTensor(value).full_tensor();
    EXPECT_LE(difference(value, loss(twins.plain, get_rank())), 1e-4);
    twins.backward(loss);
  });
  if (error.empty()) {
    twins.expect_same(1e-4);
  } else {
    EXPECT_THAT(error, ::testing::HasSubstr("in forward use the module's member"));
  }
}

TEST_P(RegistryReads, AreRightOrRefused) {
  on_ranks(GetParam(), [](int) {
    auto weight = [](torch::nn::Module& m) { return m.named_parameters()["weight"]; };
    expect_right_or_refused("linear", [=](torch::nn::Module& m, const Tensor& x) {
      return torch::linear(x, weight(m));
    });
    expect_right_or_refused("linear on a view", [=](torch::nn::Module& m, const Tensor& x) {
      return torch::linear(x, weight(m).view({5, 5}), m.parameters()[1]);
    });
    expect_right_or_refused("product",
                            [=](torch::nn::Module& m, const Tensor& x) { return x * weight(m); });
    expect_right_or_refused("matmul", [=](torch::nn::Module& m, const Tensor& x) {
      return torch::matmul(weight(m), x);
    });
    expect_right_or_refused(
        "a row", [=](torch::nn::Module& m, const Tensor& x) { return x * weight(m)[4]; });
  });
}

TEST_P(RegistryReads, RecurrentModulesAfterTo) {
  on_ranks(GetParam(), [](int) {
    Twins<torch::nn::LSTM> twins(torch::nn::LSTMOptions(5, 7));
    fully_shard(twins.sharded);
    twins.sharded->to(torch::kFloat);  // re-reads the registry
    auto loss = [](torch::nn::LSTM& m, int r) {
      torch::manual_seed(100 + r);
      return std::get<0>(m->forward(torch::randn({4, 3, 5}))).pow(2).sum();
    };
    const std::string error = error_of([&] { twins.backward(loss); });
    if (error.empty()) {
      twins.expect_same(rounding_bound());
    } else {
      EXPECT_THAT(error,
                  ::testing::HasSubstr("A recurrent module reads its parameters anew in to()"));
    }
  });
}

}  // namespace
}  // namespace fsdp2::testing::registry_reads
