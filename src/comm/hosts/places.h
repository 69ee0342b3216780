#pragma once

// Which rank of a group is on which host, and who of a host deals with what is another host's.

#include <cstddef>
#include <string>
#include <vector>

namespace fsdp2::comm {

/// Whether some of these hosts, one for each rank, are the same.
bool any_share_a_host(const std::vector<std::string>& hosts);

/// Ranks are those of the group. Hosts, and the ranks of a host, are in order of rank, however they
/// are mixed.
struct HostPlaces {
  /// `names`: the host of each rank. `rank` is this one.
  HostPlaces(std::vector<std::string> names, int rank);

  const std::vector<std::string> names;
  const int rank;
  std::vector<std::vector<int>> members;  // of each host
  size_t host = 0;                        // of this rank
  size_t index = 0;                       // of this rank among its mates
  /// For each mate the ranks of other hosts that it carries: it sends what this host has for them,
  /// and receives what they have for this host.
  std::vector<std::vector<int>> carried;
  /// The most that one of the mates carries.
  size_t most_carried = 0;

  /// All ranks of this host, this one included.
  const std::vector<int>& mates() const { return members[host]; }
  /// Who on `on` carries `other`, a rank of another host.
  int carrier(size_t on, int other) const;
  /// The name of its host, for people.
  std::string host_name(int of) const;

 private:
  std::vector<size_t> index_of_;  // of each rank on its host
};

}  // namespace fsdp2::comm
