#pragma once

// TCP ports of this host.

namespace fsdp2::launch {

/// A port that nothing listens on now.
int free_port();
/// True if a server could listen on `port` now, on all addresses.
bool port_is_free(int port);

}  // namespace fsdp2::launch
