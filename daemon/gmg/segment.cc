#include "daemon/gmg/segment.h"

#include <algorithm>

#include "common/checked.h"

namespace slice::gmg {

Capacity Capacity::For(uint32_t device_count, uint32_t domain_count, uint32_t live_ops_max) {
  Capacity capacity;
  capacity.counts[kDevices] = device_count;
  capacity.counts[kDomains] = domain_count;
  capacity.counts[kTenants] = 1024;
  capacity.counts[kTemplates] = 4096;
  capacity.counts[kGroupNames] = 65'536;
  capacity.counts[kSequences] = 16'384;
  capacity.counts[kInstances] = std::clamp<uint32_t>(live_ops_max, 16, 16'384);
  capacity.counts[kOps] = live_ops_max;
  capacity.counts[kTensors] = 2 * live_ops_max;  // layers have one or two outputs that cross
  capacity.counts[kPieces] = 65'536;
  capacity.counts[kTransfers] = 4096;
  capacity.counts[kDecisions] = 1024;
  return capacity;
}

uint64_t LayOut(const Capacity& capacity, SlabEntry (&slabs)[kSlabCount]) {
  constexpr size_t kStrides[kSlabCount] = {
      sizeof(DeviceRecord),   sizeof(DomainRecord),    sizeof(TenantRecord),
      sizeof(TemplateRecord), sizeof(GroupNameRecord), sizeof(SequenceRecord),
      sizeof(InstanceRecord), sizeof(OpRecord),        sizeof(TensorRecord),
      sizeof(PieceRecord),    sizeof(TransferRecord),  sizeof(DecisionRecord)};
  uint64_t offset = 4096;
  for (uint32_t slab = 0; slab < kSlabCount; ++slab) {
    slabs[slab] = {offset, capacity.counts[slab], static_cast<uint32_t>(kStrides[slab])};
    offset = RoundUp(offset + uint64_t{capacity.counts[slab]} * kStrides[slab], 64);
  }
  return RoundUp(offset, 4096);
}

}  // namespace slice::gmg
