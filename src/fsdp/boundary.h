#pragma once

namespace fsdp2::fsdp {

class ParamGroup;

/// Whether this thread runs a call of one of the group's modules that passed its boundary.
bool inside_boundary(const ParamGroup& group);

}  // namespace fsdp2::fsdp
