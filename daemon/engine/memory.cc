// Memory of instances: peaks in template order, grants, and the death of values (scheduling rules,
// section 2).
//
// A copy of a value lives in a domain from its making (or the first use there) until all its
// consumers are done, wherever they ran: that is when the executor may drop it.
#include <algorithm>

#include "daemon/engine/engine_impl.h"

namespace slice::engine {

using gmg::MemoryKind;
using gmg::OpState;

int64_t EngineImpl::ScratchBytes(const Instance& instance, uint32_t op) const {
  int64_t bytes = 0;
  for (const uint32_t result : instance.binding->graph->groups[op].scratch)
    bytes += Charged(instance.sizes->result_bytes(result));
  return bytes;
}

int64_t EngineImpl::OutputBytes(const Instance& instance, uint32_t op) const {
  int64_t bytes = ScratchBytes(instance, op);
  for (const uint32_t crossing : instance.binding->graph->groups[op].out)
    bytes += Charged(instance.sizes->crossing_bytes(crossing));
  return bytes;
}

// Whether the value is neither in `domain`, nor on its way to it, nor made there.
bool EngineImpl::IsMissing(const Instance& instance, uint32_t crossing, DomainIndex domain) const {
  const gmg::TensorRecord& value = gmg_.tensors(instance.slot)[crossing];
  if (((value.residency | value.in_flight) >> domain & 1) != 0) return false;
  const DeviceIndex maker = Op(instance, instance.graph->crossing()[crossing].producer).device;
  return maker == kNoDevice || DomainOf(maker) != domain;
}

int64_t EngineImpl::MissingInputBytes(const Instance& instance, uint32_t op, DomainIndex domain) {
  int64_t bytes = 0;
  for (const uint32_t crossing : instance.binding->graph->groups[op].in) {
    if (IsMissing(instance, crossing, domain)) bytes += Charged(Value(instance, crossing).bytes());
  }
  for (const uint32_t dynamic : instance.graph->groups()[op].dynamic_in) {
    if ((instance.dynamics[dynamic].present >> domain & 1) == 0)
      bytes += Charged(instance.sizes->dynamic_bytes(dynamic));
  }
  return bytes;
}

void EngineImpl::ComputePeaks(const Instance& instance, std::vector<int64_t>* peaks,
                              std::vector<int64_t>* lanes) {
  const TemplateEntry& entry = *instance.binding->graph;
  const auto op_count = static_cast<uint32_t>(instance.graph->groups().size());
  peaks->assign(config_.domains.size(), 0);
  lanes->assign(devices_.size(), 0);
  static thread_local std::vector<int64_t> live;
  static thread_local std::vector<uint64_t> values, dynamics;  // domains that hold a copy
  live.assign(config_.domains.size(), 0);
  values.assign(instance.graph->crossing().size(), 0);
  dynamics.assign(instance.sizes->dynamic_count(), 0);
  const auto release = [&](uint64_t domains, int64_t bytes) {
    for (; domains != 0; domains &= domains - 1)
      live[static_cast<size_t>(__builtin_ctzll(domains))] -= bytes;
  };
  for (uint32_t op = 0; op < op_count; ++op) {
    const DomainIndex domain = Op(instance, op).home_domain;
    const uint64_t bit = uint64_t{1} << domain;
    const auto hold = [&](uint64_t* domains, int64_t bytes) {
      if ((*domains & bit) != 0) return;
      *domains |= bit;
      live[domain] += Charged(bytes);
    };
    const TemplateEntry::GroupPlan& plan = entry.groups[op];
    for (const uint32_t c : plan.in) hold(&values[c], instance.sizes->crossing_bytes(c));
    for (const uint32_t c : plan.out) hold(&values[c], instance.sizes->crossing_bytes(c));
    for (const uint32_t d : instance.graph->groups()[op].dynamic_in)
      hold(&dynamics[d], instance.sizes->dynamic_bytes(d));
    const int64_t scratch = ScratchBytes(instance, op);
    (*peaks)[domain] = std::max((*peaks)[domain], live[domain] + scratch);
    for (const uint32_t c : plan.in) {
      if (entry.last_use[c] == op) release(values[c], Charged(instance.sizes->crossing_bytes(c)));
    }
    for (const uint32_t d : instance.graph->groups()[op].dynamic_in) {
      if (entry.dynamic_last[d] == op)
        release(dynamics[d], Charged(instance.sizes->dynamic_bytes(d)));
    }
    const int64_t workspace = instance.sizes->workspace_bytes(op) + config_.workspace_margin_bytes;
    for (uint64_t mask = DomainDevices(domain) & instance.tenant->config.device_mask; mask != 0;
         mask &= mask - 1) {
      int64_t& lane = (*lanes)[static_cast<size_t>(__builtin_ctzll(mask))];
      lane = std::max(lane, Charged(workspace));
    }
  }
}

// Whether `op` runs in template order at home, so that its memory is inside the reservation: every
// earlier op is done, or goes before it on the same device with all its inputs there. An op behind
// another takes its memory when it is launched; a copy would take it now, while the op before still
// holds what is dead by then.
bool EngineImpl::InOrder(const Instance& instance, uint32_t op, DeviceIndex device) {
  if (Op(instance, op).home_domain != DomainOf(device)) return false;
  const gmg::OpRecord* const ops = gmg_.ops(instance.slot);
  const std::vector<uint32_t>& in = instance.binding->graph->groups[op].in;
  const bool copies = std::any_of(in.begin(), in.end(), [&](uint32_t crossing) {
    return IsMissing(instance, crossing, DomainOf(device));
  });
  for (uint32_t before = instance.first_unfinished; before < op; ++before) {
    const OpState state = ops[before].state;
    if (state == OpState::kDone) continue;
    const bool ahead = (state == OpState::kIssued || state == OpState::kLaunched) &&
                       ops[before].device == device && instance.ops[before].settled &&
                       !instance.ops[before].recall_sent;
    if (!ahead || copies) return false;
  }
  return true;
}

// Takes memory for everything that `op` makes in the domain of `device` and every input copy that
// it needs there, all or nothing. Ops in template order at home are paid by the reservation and
// always succeed.
bool EngineImpl::TakeGrant(Instance* instance, uint32_t op, DeviceIndex device) {
  OpExtra& extra = instance->ops[op];
  const DomainIndex domain = DomainOf(device);
  const uint64_t bit = uint64_t{1} << domain;
  const bool reserved = InOrder(*instance, op, device);
  const TenantId tenant = instance->tenant->config.id;
  if (!reserved) {
    const int64_t bytes = OutputBytes(*instance, op) + MissingInputBytes(*instance, op, domain);
    const int64_t workspace =
        Charged(instance->sizes->workspace_bytes(op) + config_.workspace_margin_bytes);
    const int64_t raise = ledger_.LaneRaise(device, workspace);
    const int64_t quota = instance->tenant->config.memory_bytes_max;
    if (bytes + raise > ledger_.pool_free(domain)) return false;
    if (quota > 0 && bytes > quota - ledger_.pool_used(tenant) - ledger_.retained_used(tenant))
      return false;
    if (raise > 0) ledger_.SetLane(device, workspace);
    instance->lanes[device] = std::max(instance->lanes[device], workspace);
    ledger_.Charge(tenant, MemoryKind::kGrant, domain, bytes);
  }
  const TemplateEntry::GroupPlan& plan = instance->binding->graph->groups[op];
  gmg_.Write(instance->slot);
  for (const uint32_t crossing : plan.in) {
    if (!IsMissing(*instance, crossing, domain)) continue;
    gmg::TensorRecord& value = Value(*instance, crossing);
    value.in_flight = value.in_flight | bit;
    if (!reserved) value.granted = value.granted | bit;
  }
  for (const uint32_t dynamic : instance->graph->groups()[op].dynamic_in) {
    DynamicExtra& input = instance->dynamics[dynamic];
    if ((input.present & bit) != 0) continue;
    input.present |= bit;
    if (!reserved) input.granted |= bit;
  }
  if (!reserved) {
    extra.outputs_granted = true;
    for (const uint32_t crossing : plan.out) {
      gmg::TensorRecord& value = Value(*instance, crossing);
      value.granted = value.granted | bit;
    }
  }
  return true;
}

// The op will not run here after all: what it would have made is given back. Input copies stay
// until their values die.
void EngineImpl::ReleaseOutputs(Instance* instance, uint32_t op) {
  OpExtra& extra = instance->ops[op];
  if (!extra.outputs_granted) return;
  extra.outputs_granted = false;
  const DomainIndex domain = DomainOf(Op(*instance, op).device);
  const uint64_t bit = uint64_t{1} << domain;
  gmg_.Write(instance->slot);
  for (const uint32_t crossing : instance->binding->graph->groups[op].out) {
    gmg::TensorRecord& value = Value(*instance, crossing);
    value.granted = value.granted & ~bit;
  }
  ledger_.Release(instance->tenant->config.id, MemoryKind::kGrant, domain,
                  OutputBytes(*instance, op));
  admission_dirty_ = true;
}

void EngineImpl::ReleaseScratch(Instance* instance, uint32_t op) {
  if (!instance->ops[op].outputs_granted) return;
  ledger_.Release(instance->tenant->config.id, MemoryKind::kGrant,
                  DomainOf(Op(*instance, op).device), ScratchBytes(*instance, op));
  instance->ops[op].outputs_granted = false;  // the values' own masks say what is still charged
}

void EngineImpl::ReleaseValueIfDead(Instance* instance, uint32_t crossing) {
  gmg::TensorRecord& value = Value(*instance, crossing);
  if (value.consumers_left() > 0 || value.in_flight != 0) return;
  gmg_.Write(instance->slot);
  for (uint64_t mask = value.granted; mask != 0; mask &= mask - 1) {
    ledger_.Release(instance->tenant->config.id, MemoryKind::kGrant,
                    static_cast<DomainIndex>(__builtin_ctzll(mask)), Charged(value.bytes()));
    admission_dirty_ = true;
  }
  value.granted = uint64_t{0};
  value.residency = uint64_t{0};
}

void EngineImpl::ReleaseDynamicIfDead(Instance* instance, uint32_t dynamic) {
  DynamicExtra& input = instance->dynamics[dynamic];
  if (input.uses_left > 0) return;
  for (uint64_t mask = input.granted; mask != 0; mask &= mask - 1) {
    ledger_.Release(instance->tenant->config.id, MemoryKind::kGrant,
                    static_cast<DomainIndex>(__builtin_ctzll(mask)),
                    Charged(instance->sizes->dynamic_bytes(dynamic)));
    admission_dirty_ = true;
  }
  input.granted = input.present = 0;
}

// Grants only; the reservation goes with Finalise.
void EngineImpl::ReleaseAllMemory(Instance* instance) {
  for (uint32_t op = 0; op < instance->ops.size(); ++op) {
    if (!instance->ops[op].outputs_granted) continue;
    ReleaseScratch(instance, op);
  }
  gmg_.Write(instance->slot);
  for (uint32_t crossing = 0; crossing < instance->graph->crossing().size(); ++crossing) {
    gmg::TensorRecord& value = Value(*instance, crossing);
    value.set_consumers_left(0);
    value.in_flight = uint64_t{0};
    ReleaseValueIfDead(instance, crossing);
  }
  for (uint32_t dynamic = 0; dynamic < instance->dynamics.size(); ++dynamic) {
    instance->dynamics[dynamic].uses_left = 0;
    ReleaseDynamicIfDead(instance, dynamic);
  }
}

void EngineImpl::RecomputeLane(DeviceIndex device) {
  int64_t lane = 0;
  for (const Instance* const instance : started_) lane = std::max(lane, instance->lanes[device]);
  if (lane < ledger_.lane(device)) ledger_.SetLane(device, lane);
}

}  // namespace slice::engine
