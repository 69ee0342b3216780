#include "comm/shared_memory.h"

#include "comm/rendezvous.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <linux/futex.h>
#include <sched.h>
#include <sstream>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fsdp2::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kAlone = "/process ";

std::string link_text(const char* path) {
  std::error_code error;
  return std::filesystem::read_symlink(path, error).string();
}

/// The half of the counter that the kernel compares; it changes with every step.
uint32_t* low_half(std::atomic<uint64_t>& value) { return reinterpret_cast<uint32_t*>(&value); }

void wake(std::atomic<uint64_t>& value) {
  ::syscall(SYS_futex, low_half(value), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

/// Whether the kernel can.
bool sleep_for_any([[maybe_unused]] std::span<Counter* const> counters,
                   [[maybe_unused]] std::span<const uint64_t> seen,
                   [[maybe_unused]] std::chrono::milliseconds sleep) {
#if defined(FUTEX_32) && defined(SYS_futex_waitv)
  std::vector<futex_waitv> futexes(counters.size());
  for (size_t i = 0; i < counters.size(); ++i) {
    futexes[i].val = static_cast<uint32_t>(seen[i]);
    futexes[i].uaddr = reinterpret_cast<uintptr_t>(low_half(counters[i]->value));
    futexes[i].flags = FUTEX_32;
  }
  timespec end = {};
  ::clock_gettime(CLOCK_MONOTONIC, &end);
  const int64_t nanoseconds = end.tv_nsec + sleep.count() % 1000 * 1'000'000;
  end.tv_sec += sleep.count() / 1000 + nanoseconds / 1'000'000'000;
  end.tv_nsec = nanoseconds % 1'000'000'000;
  return ::syscall(SYS_futex_waitv, futexes.data(), futexes.size(), 0, &end, CLOCK_MONOTONIC) >=
             0 ||
         errno == EAGAIN || errno == ETIMEDOUT || errno == EINTR;
#else
  return false;
#endif
}

int cores() {
  cpu_set_t set;
  return ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool may_share_memory() {
  const char* setting = std::getenv("FSDP2_SHARED_MEMORY");
  const std::string wanted = setting ? setting : "";
  TORCH_CHECK(wanted.empty() || wanted == "on" || wanted == "off", "FSDP2_SHARED_MEMORY is '",
              wanted, "': it can be 'on' (the default) or 'off'");
  return wanted != "off";
}

std::string host_identity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  const std::string host =
      boot + '/' + link_text("/proc/self/ns/pid") + '/' + link_text("/proc/self/ns/net");
  return may_share_memory() ? host : host + kAlone + std::to_string(::getpid());
}

bool is_alone(const std::string& host_identity) {
  return host_identity.find(kAlone) != std::string::npos;
}

SharedMemory::SharedMemory(int file, size_t bytes) : file_(file), size_(bytes) {
  void* at = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (at == MAP_FAILED) {
    const int error = errno;
    ::close(file_);
    TORCH_CHECK(false, "cannot map ", size_, " bytes of shared memory: ", std::strerror(error));
  }
  data_ = static_cast<std::byte*>(at);
}

SharedMemory::~SharedMemory() {
  ::munmap(data_, size_);
  ::close(file_);
}

std::shared_ptr<SharedMemory> SharedMemory::create(size_t bytes, const std::string& name) {
  const int file = ::memfd_create(("fsdp2:" + name).substr(0, 200).c_str(), MFD_CLOEXEC);
  TORCH_CHECK(file >= 0, "cannot create shared memory: ", std::strerror(errno));
  if (::ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    const int error = errno;
    ::close(file);
    TORCH_CHECK(false, "cannot create ", bytes, " bytes of shared memory: ", std::strerror(error));
  }
  return std::shared_ptr<SharedMemory>(new SharedMemory(file, bytes));
}

std::shared_ptr<SharedMemory> SharedMemory::open(const std::string& ticket) {
  std::istringstream in(ticket);
  int process = 0, number = 0;
  size_t bytes = 0;
  in >> process >> number >> bytes;
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(number);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(file >= 0, "cannot open the shared memory of process ", process, ": ",
              std::strerror(errno));
  return std::shared_ptr<SharedMemory>(new SharedMemory(file, bytes));
}

std::string SharedMemory::ticket() const {
  return std::to_string(::getpid()) + ' ' + std::to_string(file_) + ' ' + std::to_string(size_);
}

// The number and the sleepers are in one total order with await(): either this sees the sleeper, or
// the sleeper sees the number.
void Counter::set(uint64_t to) {
  value.store(to, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) wake(value);
}

void Counter::raise() {
  value.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) wake(value);
}

bool Counter::await(uint64_t least, std::chrono::nanoseconds spin,
                    std::chrono::milliseconds sleep) {
  if (get() >= least) return true;
  if (spin.count() > 0) {
    const auto end = Clock::now() + spin;
    do {
      for (int i = 0; i < 32; ++i) {
        relax();
        if (get() >= least) return true;
      }
    } while (Clock::now() < end);
  }
  if (sleep.count() <= 0) return false;
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint64_t seen = value.load(std::memory_order_seq_cst);
  if (seen < least) {
    const timespec limit = {.tv_sec = sleep.count() / 1000,
                            .tv_nsec = sleep.count() % 1000 * 1'000'000};
    ::syscall(SYS_futex, low_half(value), FUTEX_WAIT, static_cast<uint32_t>(seen), &limit, nullptr,
              0);
  }
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return get() >= least;
}

void await_any(std::span<Counter* const> counters, std::span<const uint64_t> seen,
               std::chrono::milliseconds sleep) {
  if (counters.size() == 1) {
    counters[0]->await(seen[0] + 1, {}, sleep);
    return;
  }
  for (Counter* counter : counters) counter->sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (!sleep_for_any(counters, seen, sleep)) ::usleep(500);
  for (Counter* counter : counters) counter->sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

/// `state`: 0 not there yet, 1 present, 2 left. A present member also holds a lock on its byte of
/// the file, which the kernel lifts when the process ends, however it ends.
struct Presence::Member {
  Counter state;
  std::atomic<int32_t> process;
};

size_t Presence::bytes(int ranks) { return static_cast<size_t>(ranks) * sizeof(Member); }

Presence::Member& Presence::member(int rank) const {
  return reinterpret_cast<Member*>(memory_->data())[rank];
}

Presence::Presence(std::shared_ptr<SharedMemory> memory, int rank, std::vector<int> ranks,
                   std::string name, std::chrono::milliseconds timeout)
    : memory_(std::move(memory)),
      rank_(rank),
      ranks_(std::move(ranks)),
      name_(std::move(name)),
      timeout_(timeout) {
  if (cores() >= size()) spin_ = std::chrono::microseconds(30);
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank_;
  lock.l_len = 1;
  TORCH_CHECK(::fcntl(memory_->file(), F_SETLK, &lock) == 0,
              "cannot lock shared memory: ", std::strerror(errno));
  member(rank_).process.store(::getpid());
  member(rank_).state.set(1);
}

Presence::~Presence() { leave(); }

void Presence::leave() const {
  // Not by a process that was forked from the member.
  if (member(rank_).process.load() == ::getpid()) member(rank_).state.set(2);
}

std::string Presence::who(int rank) const {
  return "rank " + std::to_string(global_rank(rank)) + " (process " +
         std::to_string(member(rank).process.load()) + ")";
}

const char* Presence::gone(int rank) const {
  Member& other = member(rank);
  if (other.state.get() == 2) return "has left";
  const int process = other.process.load();
  if (other.state.get() == 0 || process == ::getpid()) return "";
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  if (::fcntl(memory_->file(), F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK) return "";
  return other.state.get() == 2 ? "has left" : "has died";
}

void Presence::check(int rank) const {
  const char* gone_how = gone(rank);
  TORCH_CHECK(*gone_how == '\0', who(rank), ' ', gone_how, "; it was in group '", name_, "'");
}

void Presence::fail_late(int rank, std::chrono::milliseconds waited) const {
  TORCH_CHECK(false, "waited ", duration_text(waited), " for ", who(rank), " in group '", name_,
              "': it runs, but did not get here");
}

void Presence::wait(Counter& counter, uint64_t least, int rank) const {
  if (counter.await(least, spin_, std::chrono::milliseconds(0))) return;
  const auto start = Clock::now();
  while (!counter.await(least, {}, std::chrono::milliseconds(50))) {
    check(rank);
    if (Clock::now() - start > timeout_) fail_late(rank, timeout_);
  }
}

}  // namespace fsdp2::comm
