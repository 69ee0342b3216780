#pragma once

#include <fsdp2/collectives.h>
#include <fsdp2/device_mesh.h>
#include <fsdp2/dtensor.h>
#include <fsdp2/fully_shard.h>
#include <fsdp2/mixed_precision.h>
#include <fsdp2/placement.h>
#include <fsdp2/process_group.h>
