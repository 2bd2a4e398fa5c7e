#include "daemon/sim/snapshot.h"

namespace slice::sim {

void Snapshot::Clear() {
  now = 0;
  devices.clear();
  domains.clear();
  instances.clear();
  ops.clear();
  tensors.clear();
  transfers.clear();
  edges.clear();
  uses.clear();
  kind_scale.clear();
  offline_op_max = kNever;
}

}  // namespace slice::sim
