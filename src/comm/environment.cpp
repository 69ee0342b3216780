#include "comm/environment.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <cstdlib>
#include <string_view>

namespace fsdp2::comm {
namespace {

std::string text_from_environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::optional<int> merged(const std::optional<int>& field, const char* field_name,
                          const char* variable) {
  const std::optional<int> value = number_from_environment(variable);
  TORCH_CHECK(!field || !value || *field == *value, "init_process_group: InitOptions::", field_name,
              " is ", *field, " but the variable ", variable, " is ", *value,
              ": give one of them, or the same value");
  return field ? field : value;
}

int needed(const std::optional<int>& value, const char* variable, const char* field_name) {
  TORCH_CHECK(
      value, "init_process_group: ", variable,
      " is not set, though other variables or options say that this ",
      "process is one of several: set ", variable,
      " (torchrun and `fsdp2 run` do) or InitOptions::", field_name,
      ", or unset RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT ",
      "to run as one process");
  return *value;
}

bool alone(const InitOptions& options) {
  if (options.rank || options.world_size || options.master_port || !options.master_addr.empty() ||
      options.store) {
    return false;
  }
  for (const char* name :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    if (!text_from_environment(name).empty()) return false;
  }
  return true;
}

void read_address(const InitOptions& options, Membership& membership) {
  const std::string address = text_from_environment("MASTER_ADDR");
  TORCH_CHECK(options.master_addr.empty() || address.empty() || options.master_addr == address,
              "init_process_group: InitOptions::master_addr is '", options.master_addr,
              "' but the variable ", "MASTER_ADDR is '", address,
              "': give one of them, or the same value");
  membership.master_addr = options.master_addr.empty() ? address : options.master_addr;
  const std::optional<int> port = merged(options.master_port, "master_port", "MASTER_PORT");
  if (membership.world_size == 1 && membership.master_addr.empty() && !port) return;
  TORCH_CHECK(!membership.master_addr.empty(),
              "init_process_group: MASTER_ADDR is not set: set it, or ",
              "InitOptions::master_addr, to the name or address of rank 0's host");
  membership.master_port = needed(port, "MASTER_PORT", "master_port");
  TORCH_CHECK(membership.master_port > 0 && membership.master_port < 65536,
              "init_process_group: MASTER_PORT is ", membership.master_port,
              ", which is not a port (1 to 65535)");
  membership.agent_store = text_from_environment("TORCHELASTIC_USE_AGENT_STORE") == "True";
}

}  // namespace

std::optional<int> number_from_environment(const char* name) {
  const std::string text = text_from_environment(name);
  if (text.empty()) return std::nullopt;
  int value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  TORCH_CHECK(error == std::errc() && stop == end, "init_process_group: the variable ", name,
              " is '", text, "', which is not a whole number");
  return value;
}

Membership read_membership(const InitOptions& options) {
  TORCH_CHECK(options.timeout.count() > 0, "init_process_group: InitOptions::timeout is ",
              options.timeout.count(), " ms: it must be positive");
  Membership membership;
  if (alone(options)) return membership;
  const std::optional<int> rank = merged(options.rank, "rank", "RANK");
  const std::optional<int> world_size = merged(options.world_size, "world_size", "WORLD_SIZE");
  membership.rank = needed(rank, "RANK", "rank");
  membership.world_size = needed(world_size, "WORLD_SIZE", "world_size");
  TORCH_CHECK(membership.world_size > 0, "init_process_group: WORLD_SIZE is ",
              membership.world_size, ": it must be at least 1");
  TORCH_CHECK(membership.rank >= 0 && membership.rank < membership.world_size,
              "init_process_group: RANK is ", membership.rank, ", outside 0 to ",
              membership.world_size - 1, " (WORLD_SIZE is ", membership.world_size, ")");

  membership.local_rank = number_from_environment("LOCAL_RANK");
  const std::optional<int> local_world_size = number_from_environment("LOCAL_WORLD_SIZE");
  TORCH_CHECK(
      !local_world_size || (*local_world_size > 0 && *local_world_size <= membership.world_size),
      "init_process_group: LOCAL_WORLD_SIZE is ", *local_world_size,
      ", outside 1 to WORLD_SIZE, which is ", membership.world_size);
  if (membership.local_rank) {
    const int end = local_world_size.value_or(membership.world_size);
    TORCH_CHECK(*membership.local_rank >= 0 && *membership.local_rank < end,
                "init_process_group: LOCAL_RANK is ", *membership.local_rank, ", outside 0 to ",
                end - 1, " (", local_world_size ? "LOCAL_WORLD_SIZE" : "WORLD_SIZE", " is ", end,
                ")");
  }
  if (!options.store) read_address(options, membership);
  return membership;
}

}  // namespace fsdp2::comm
