// Which backend a group of CPU tensors gets.

#include "comm/groups.h"
#include "comm/host_presence.h"
#include "support/errors.h"
#include "support/host_groups.h"
#include "support/ranks.h"

#include <fsdp2/collectives.h>
#include <fsdp2/device_mesh.h>
#include <fsdp2/process_group.h>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/torch.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fsdp2::testing::shm_choice {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;

void expect_works(const ProcessGroup& group) {
  const torch::Tensor ones = torch::ones({3});
  wait(all_reduce(ones, ReduceOp::kSum, group));
  EXPECT_TRUE(ones.equal(torch::full({3}, group->getSize())));
}

TEST(ShmChoice, IsTheDefaultOnOneHostAndForWhatComesFromIt) {
  unsetenv("FSDP2_SHARED_MEMORY");
  on_ranks(4, [](int rank) {
    EXPECT_EQ(backend_name(world_group()), "shm");
    EXPECT_EQ(backend_name(new_group({0, 1, 2, 3})), "shm");
    EXPECT_EQ(backend_name(comm::second_group(world_group())), "shm");
    EXPECT_EQ(backend_name(comm::neighbour_group(world_group(), 2)), "shm");
    EXPECT_EQ(backend_name(comm::host_group(world_group())), "gloo");
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"a", "b"});
    EXPECT_EQ(backend_name(mesh.get_group(0)), "shm");
    const auto presence = comm::presence_of(mesh.get_group(1));
    ASSERT_NE(presence, nullptr);
    EXPECT_EQ(presence->size(), 2);
    EXPECT_EQ(presence->rank(), rank % 2);
    EXPECT_EQ(presence->global_rank(1), rank / 2 * 2 + 1);
  });
}

TEST(ShmChoice, GlooWhereMemoryMayNotBeShared) {
  setenv("FSDP2_SHARED_MEMORY", "off", 1);
  on_ranks(2, [](int) {
    EXPECT_EQ(backend_name(world_group()), "gloo");
    EXPECT_EQ(backend_name(comm::second_group(world_group())), "gloo");
    EXPECT_EQ(comm::presence_of(world_group()), nullptr);
    expect_works(world_group());
  });
  setenv("FSDP2_SHARED_MEMORY", "of", 1);
  EXPECT_THAT(error_of([] { comm::parse_backends(""); }),
              HasSubstr("FSDP2_SHARED_MEMORY is 'of': it can be 'on' (the default) or 'off'"));
  unsetenv("FSDP2_SHARED_MEMORY");
  EXPECT_EQ(comm::parse_backends("gloo").at(c10::kCPU), "gloo");
  EXPECT_EQ(comm::parse_backends("cpu:shm").at(c10::kCPU), "shm");
  EXPECT_THAT(error_of([] { comm::parse_backends("cuda:shm"); }), HasSubstr("shm is for cpu"));
}

TEST(ShmChoice, GlooForAllWhereOneMayNotShareMemory) {
  const std::string path = ::testing::TempDir() + "/mixed." + std::to_string(getpid());
  on_processes(3, [&](int rank) {
    if (rank == 1) setenv("FSDP2_SHARED_MEMORY", "off", 1);
    InitOptions options;
    options.rank = rank;
    options.world_size = 3;
    options.store = c10::make_intrusive<c10d::FileStore>(path, 3);
    options.timeout = 20s;
    init_process_group(options);
    EXPECT_EQ(backend_name(world_group()), "gloo");
    expect_works(world_group());
    const ProcessGroup with_it = new_group({0, 1}), without_it = new_group({0, 2});
    EXPECT_EQ(with_it ? backend_name(with_it) : "none", rank == 2 ? "none" : "gloo");
    EXPECT_EQ(without_it ? backend_name(without_it) : "none", rank == 1 ? "none" : "shm");
    destroy_process_group();
  });
  unlink(path.c_str());
}

TEST(ShmChoice, SeveralHostsGetSharedMemoryInsideEachAndGlooBetween) {
  on_ranks(3, [](int) {
    const ProcessGroup mixed = group_on({"a/1", "b/2", "a/1"}, comm::kBest, "mixed");
    EXPECT_EQ(backend_name(mixed), "hosts");
    expect_works(mixed);
    EXPECT_EQ(backend_name(comm::second_group(mixed)), "hosts");
    const ProcessGroup apart = group_on({"a/1", "b/2", "c/3"}, comm::kBest, "apart");
    EXPECT_EQ(backend_name(apart), "gloo");
    expect_works(apart);
    EXPECT_EQ(backend_name(group_on({"a/1", "a/1", "a/1"}, comm::kBest, "together")), "shm");
    EXPECT_EQ(backend_name(group_on({"a/1", "a/1", "a/1"}, "gloo", "asked")), "gloo");
    EXPECT_THAT(
        error_of([] { group_on({"a/1", "b/2", "a/1"}, "shm", "refused"); }),
        AllOf(HasSubstr("'refused'"), HasSubstr("a: {0, 2}, b: {1}"), HasSubstr("use 'gloo'")));
  });
}

/// From here on this process cannot create shared memory.
void forbid_memfd() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter = {sizeof program / sizeof *program, program};
  ASSERT_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter), 0);
}

TEST(ShmChoice, WhereMemoryCannotBeSharedAllRanksGetGlooAndAreTold) {
  on_ranks(3, [](int rank) {
    if (rank == 0) forbid_memfd();
    ::testing::internal::CaptureStderr();
    const ProcessGroup group = new_group({0, 1, 2}, "barred");
    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(backend_name(group), "gloo");
    expect_works(group);
    if (rank == 0) {
      EXPECT_THAT(said, AllOf(HasSubstr("group 'barred'"), HasSubstr("uses gloo"),
                              HasSubstr("rank 0: cannot create shared memory")));
    } else {
      EXPECT_EQ(said, "");
    }
    // Another rank creates the memory of this one, which it can.
    EXPECT_EQ(backend_name(new_group({1, 0, 2})), "shm");
    EXPECT_THAT(error_of([] { group_on({"a", "a", "a"}, "shm", "asked"); }),
                AllOf(HasSubstr("could not connect group 'asked' over shm"),
                      HasSubstr("rank 0: cannot create shared memory"), HasSubstr("use 'gloo'")));
  });
}

}  // namespace
}  // namespace fsdp2::testing::shm_choice
