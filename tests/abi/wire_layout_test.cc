// Shared-memory records, their offsets and sizes written down a second time. A failing line means
// that processes of two builds would misread each other: bump kTenantRingVersion or
// kExecutorRingVersion, and only then change this file.
#include <gtest/gtest.h>

#include <cstddef>

#include "common/wire/control.h"
#include "common/wire/executor_ring.h"
#include "common/wire/tenant_ring.h"

namespace slice::wire {
namespace {

#define AT(type, field, offset)                                                   \
  static_assert(offsetof(type, field) == (offset), #type "." #field               \
                                                         " moved: bump the ring " \
                                                         "version")
#define SIZE(type, bytes) \
  static_assert(sizeof(type) == (bytes), #type " changed its size: bump the ring version")

// ---- tenant_ring.h

AT(SubmitSlot, cookie, 0);
AT(SubmitSlot, binding, 8);
AT(SubmitSlot, sequence, 16);
AT(SubmitSlot, deadline_ns, 24);
AT(SubmitSlot, args_offset, 32);
AT(SubmitSlot, args_bytes, 36);
AT(SubmitSlot, priority, 40);
AT(SubmitSlot, flags, 44);
AT(SubmitSlot, reserved, 48);
SIZE(SubmitSlot, 64);

AT(Argument, handle, 0);
AT(Argument, offset, 8);
AT(Argument, bytes, 16);
SIZE(Argument, 24);

AT(CompletionSlot, cookie, 0);
AT(CompletionSlot, status, 8);
AT(CompletionSlot, failed_op, 12);
AT(CompletionSlot, submit_ns, 16);
AT(CompletionSlot, start_ns, 24);
AT(CompletionSlot, finish_ns, 32);
AT(CompletionSlot, predicted_finish_ns, 40);
AT(CompletionSlot, text_token, 48);
AT(CompletionSlot, reserved, 52);
SIZE(CompletionSlot, 64);

// ---- executor_ring.h

AT(StartInstance, instance, 0);
AT(StartInstance, attempt, 8);
AT(StartInstance, binding, 12);
AT(StartInstance, tenant, 16);
AT(StartInstance, symbol_count, 20);
AT(StartInstance, input_count, 24);
AT(StartInstance, output_count, 28);
SIZE(StartInstance, 32);

AT(ArenaRange, offset, 0);
AT(ArenaRange, bytes, 8);
SIZE(ArenaRange, 16);

AT(EndInstance, instance, 0);
AT(EndInstance, attempt, 8);
AT(EndInstance, reserved, 12);
SIZE(EndInstance, 16);

AT(Issue, instance, 0);
AT(Issue, attempt, 8);
AT(Issue, op, 12);
AT(Issue, device, 16);
AT(Issue, service_class, 17);
AT(Issue, flags, 18);
AT(Issue, priority, 20);
AT(Issue, order, 24);
AT(Issue, earliest_ns, 32);
AT(Issue, end_by_ns, 40);
AT(Issue, duration_ns, 48);
SIZE(Issue, 56);

AT(Rekey, instance, 0);
AT(Rekey, attempt, 8);
AT(Rekey, op, 12);
AT(Rekey, priority, 16);
AT(Rekey, reserved, 20);
AT(Rekey, order, 24);
SIZE(Rekey, 32);

AT(Recall, instance, 0);
AT(Recall, attempt, 8);
AT(Recall, op, 12);
SIZE(Recall, 16);

AT(Watch, transfer, 0);
AT(Watch, instance, 8);
AT(Watch, attempt, 16);
AT(Watch, value, 20);
AT(Watch, set, 24);
AT(Watch, source_domain, 28);
AT(Watch, destination_domain, 29);
AT(Watch, service_class, 30);
AT(Watch, move, 31);
SIZE(Watch, 32);

AT(TransferRef, transfer, 0);
SIZE(TransferRef, 8);

AT(TensorCommandRun, command, 0);
AT(TensorCommandRun, kind, 8);
AT(TensorCommandRun, set, 12);
AT(TensorCommandRun, tensor, 16);
AT(TensorCommandRun, domain, 20);
AT(TensorCommandRun, reserved, 21);
AT(TensorCommandRun, tenant, 24);
AT(TensorCommandRun, dimension, 28);
AT(TensorCommandRun, parameter, 32);
AT(TensorCommandRun, arena_offset, 40);
AT(TensorCommandRun, arena_bytes, 48);
SIZE(TensorCommandRun, 56);

AT(DropReplica, set, 0);
AT(DropReplica, tensor, 4);
AT(DropReplica, domain, 8);
AT(DropReplica, reserved, 9);
SIZE(DropReplica, 16);

AT(Started, instance, 0);
AT(Started, attempt, 8);
AT(Started, op, 12);
AT(Started, start_ns, 16);
AT(Started, device, 24);
AT(Started, reserved, 28);
SIZE(Started, 32);

AT(Finished, instance, 0);
AT(Finished, attempt, 8);
AT(Finished, op, 12);
AT(Finished, start_ns, 16);
AT(Finished, end_ns, 24);
AT(Finished, cpu_ns, 32);
AT(Finished, peak_bytes, 40);
AT(Finished, device, 48);
AT(Finished, reserved, 52);
SIZE(Finished, 56);

AT(Failed, instance, 0);
AT(Failed, attempt, 8);
AT(Failed, op, 12);
AT(Failed, status, 16);
AT(Failed, began_write, 20);
AT(Failed, text, 24);
SIZE(Failed, 128);

AT(Recalled, instance, 0);
AT(Recalled, attempt, 8);
AT(Recalled, op, 12);
AT(Recalled, reason, 16);
AT(Recalled, reserved, 20);
SIZE(Recalled, 24);

AT(Intent, transfer, 0);
AT(Intent, ready_ns, 8);
SIZE(Intent, 16);

AT(TransferDone, transfer, 0);
AT(TransferDone, start_ns, 8);
AT(TransferDone, end_ns, 16);
AT(TransferDone, bytes, 24);
AT(TransferDone, status, 32);
AT(TransferDone, reserved, 36);
SIZE(TransferDone, 40);

AT(CommandDone, command, 0);
AT(CommandDone, status, 8);
AT(CommandDone, reserved, 12);
SIZE(CommandDone, 16);

AT(InstanceEnded, instance, 0);
AT(InstanceEnded, attempt, 8);
AT(InstanceEnded, reserved, 12);
SIZE(InstanceEnded, 16);

static_assert(kTenantRingVersion == 1 && kExecutorRingVersion == 1,
              "then this file must change too");
static_assert(kRingSlots == 256 && kArgumentAreaBytes == 262144);
static_assert(kSubmitTailOffset == 0 && kCompletionHeadOffset == 64);
static_assert(kSubmitHeadOffset == 0 && kCompletionTailOffset == 64 &&
              kDaemonSleepingOffset == 128);
static_assert(kSlotsOffset == 4096 && kArgumentsOffset == 20480);
static_assert(kTenantRingBytes == 282624 && kDaemonRingBytes == 20480);
static_assert(kSubmitGraph == 0 && kSequenceOpen == 1 && kSequenceClose == 2 && kCancel == 3 &&
              kTensorCommand == 4);
static_assert(kTensorReset == 0 && kTensorFill == 1 && kTensorCrop == 2 && kTensorWrite == 3 &&
              kTensorRead == 4);
static_assert(kStartInstance == 1 && kDropReplica == 11 && kStarted == 101 &&
              kInstanceEnded == 108);
static_assert(kControlMessageBytesMax == 65536);

TEST(WireLayoutTest, Happy_LayoutsAreWhatTheyWere) { SUCCEED() << "checked by the compiler"; }

}  // namespace
}  // namespace slice::wire
