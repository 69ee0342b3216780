#pragma once

namespace fsdp2::train {

/// While one lives, SIGTERM and SIGINT are noted instead of ending the process; a second one ends
/// it. At most one at a time.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  /// SIGTERM or SIGINT, or 0 if none has come.
  static int received();
};

}  // namespace fsdp2::train
