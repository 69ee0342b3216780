// Moments in a file: the same bits, little memory, nothing left behind.

#include "support/errors.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "support/twins.h"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <sys/resource.h>

namespace fsdp2::testing::nvme_offload {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::Tensor;
using torch::optim::AdamWOptions;

optim::AdamWExtras into(const std::string& path, bool keep = false) {
  return {.maximize = false, .nvme_offload = NvmeOffloadPolicy{path, keep}};
}

int64_t kib_of(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word == key + ":") {
      int64_t value = 0;
      status >> value;
      return value;
    }
  }
  return -1;
}

TEST(NvmeOffload, StepsAreBitIdenticalToThoseInMemory) {
  for (int world : {1, 2, 3, 4}) {
    const TemporaryFolder folder;
    on_ranks(world, [&](int) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world});
      torch::manual_seed(7);
      std::vector<Tensor> memory, disk;
      for (auto dtype : {torch::kFloat, torch::kBFloat16, torch::kComplexFloat}) {
        for (const auto& sizes : std::vector<std::vector<int64_t>>{{7, 300}, {3}, {}}) {
          const Tensor value = torch::randn(sizes, dtype);
          const Placements placements = {sizes.empty() ? Replicate() : Shard(0)};
          for (auto* list : {&memory, &disk}) {
            list->push_back(chunk_tensor(value, mesh, placements).detach().requires_grad_());
            list->push_back(value.clone().requires_grad_());
          }
        }
      }
      const auto options = AdamWOptions(0.1).amsgrad(true).weight_decay(0.1);
      optim::AdamW first(memory, options), second(disk, options, into(folder.path()));
      for (int step = 0; step < 4; ++step) {
        for (size_t i = 0; i < memory.size(); ++i) {
          memory[i].mutable_grad() = torch::ones_like(memory[i]) * (step - 1.3);
          disk[i].mutable_grad() = memory[i].grad();
        }
        first.step();
        second.step();
      }
      for (size_t i = 0; i < memory.size(); ++i) {
        EXPECT_EQ(difference(full(disk[i]), full(memory[i])), 0) << "parameter " << i;
        const auto moment = [&](torch::optim::Optimizer& optimizer, const Tensor& parameter) {
          return static_cast<torch::optim::AdamWParamState&>(
                     *optimizer.state().at(parameter.unsafeGetTensorImpl()))
              .exp_avg_sq();
        };
        const Tensor ours = moment(second, disk[i]);
        EXPECT_EQ(is_dtensor(ours), is_dtensor(disk[i]));
        EXPECT_EQ(difference(full(ours), full(moment(first, memory[i]))), 0);
      }
    });
  }
}

TEST(NvmeOffload, MomentsDoNotStayInMemory) {
  const TemporaryFolder folder;
  on_processes(1, [&](int) {
    constexpr int64_t kParameters = 12, kElements = 1 << 20;
    std::vector<Tensor> parameters;
    for (int64_t i = 0; i < kParameters; ++i) {
      parameters.push_back(torch::ones({kElements}).requires_grad_());
      parameters.back().mutable_grad() = torch::ones({kElements});
    }
    optim::AdamW optimizer(parameters, AdamWOptions(0.1), into(folder.path()));
    const int64_t before = kib_of("VmRSS");
    for (int step = 0; step < 3; ++step) optimizer.step();
    // Two moments of 4 MiB each a parameter are 96 MiB.
    EXPECT_LT(kib_of("VmHWM") - before, 40 * 1024);
    EXPECT_LT(kib_of("VmRSS") - before, 24 * 1024);
  });
}

TEST(NvmeOffload, FilesGoUnlessAskedFor) {
  const TemporaryFolder folder;
  for (bool keep : {false, true}) {
    Tensor p = torch::ones({3}).requires_grad_();
    p.mutable_grad() = torch::ones({3});
    optim::AdamW optimizer({p}, AdamWOptions(0.1), into(folder.path(), keep));
    optimizer.step();
    EXPECT_EQ(std::filesystem::is_empty(folder.path()), !keep);
  }
}

TEST(NvmeOffload, MomentsFromAnArchiveMoveToTheFile) {
  const TemporaryFolder folder;
  std::vector<Tensor> parameters;
  for (int i = 0; i < 2; ++i) {
    parameters.push_back(torch::ones({3000}).requires_grad_());
    parameters.back().mutable_grad() = torch::arange(3000.0);
  }
  optim::AdamW memory({parameters[0]}, AdamWOptions(0.1));
  optim::AdamW disk({parameters[1]}, AdamWOptions(0.1), into(folder.path()));
  memory.step();
  disk.step();
  std::stringstream archive;
  torch::save(memory, archive);
  torch::load(disk, archive);
  memory.step();
  disk.step();
  EXPECT_EQ(difference(parameters[0], parameters[1]), 0);
}

TEST(NvmeOffload, ErrorsNameThePath) {
  Tensor p = torch::ones({3}).requires_grad_();
  EXPECT_THAT(error_of([&] { optim::AdamW({p}, AdamWOptions(0.1), into("/nowhere/at/all")); }),
              AllOf(HasSubstr("/nowhere/at/all"), HasSubstr("No such file or directory")));
  const TemporaryFolder folder;
  on_processes(1, [&](int) {
    // As on a full disk: no file may grow beyond this.
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {100000, 100000};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
    Tensor large = torch::ones({100000}).requires_grad_();
    large.mutable_grad() = torch::ones({100000});
    optim::AdamW optimizer({large}, AdamWOptions(0.1), into(folder.path()));
    EXPECT_THAT(error_of([&] { optimizer.step(); }),
                AllOf(HasSubstr(folder.path()), HasSubstr("File too large")));
    EXPECT_TRUE(torch::equal(large, torch::ones({100000}))) << "changed although it failed";
  });
}

}  // namespace
}  // namespace fsdp2::testing::nvme_offload
