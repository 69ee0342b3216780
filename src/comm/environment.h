#pragma once

// What torchrun (and `fsdp2 run`) tells a process about its place, merged with explicit options and
// checked.

#include <fsdp2/process_group.h>

#include <optional>
#include <string>

namespace fsdp2::comm {

struct Membership {
  int rank = 0;
  int world_size = 1;
  std::optional<int> local_rank;  // only if the environment says it
  std::string master_addr;        // empty: no address is needed
  int master_port = 0;
  /// The launcher runs the store at the address, so that rank 0 must not.
  bool agent_store = false;
};

/// Reads what `options` leaves open from the environment. Errors name the variable or the field. No
/// connection is made.
Membership read_membership(const InitOptions& options);

/// An environment variable as a whole number; nothing if unset or empty. Error naming it if it is
/// not a number.
std::optional<int> number_from_environment(const char* name);

}  // namespace fsdp2::comm
