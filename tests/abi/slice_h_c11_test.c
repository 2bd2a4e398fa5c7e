/* slice.h in plain C11, and its structs' layout declared a second time. A difference here breaks
 * every program that was compiled against an older header: fields may only be added at the end (see
 * the head of slice.h). */
#include <stdio.h>
#include <string.h>

#include "slice/slice.h"

struct old_session_options {
  size_t size;
  const char* socket_path;
  const char* name;
  uint32_t service_class, reserved;
  double weight;
  uint64_t arena_bytes;
  const char* home_device;
};
struct old_session_limits {
  size_t size;
  uint32_t service_class, queue_slots;
  uint64_t memory_bytes_max, arena_bytes, offline_op_ns_max, deadline_ns_min, daemon_epoch;
  uint32_t device_count, session_number;
};
struct old_tensor_spec {
  size_t size;
  const char* name;
  uint32_t dtype, dim_count;
  int64_t sizes[8];
  int64_t strides[8];
  uint64_t offset;
};
struct old_sequence_options {
  size_t size;
  uint32_t service_class;
  int32_t priority;
  uint64_t deadline_ns;
};
struct old_slot {
  uint64_t offset, bytes;
};
struct old_submit_args {
  size_t size;
  uint64_t binding, sequence, deadline_ns;
  int32_t priority;
  uint32_t symbol_count;
  const int64_t* symbols;
  const struct old_slot* inputs;
  const struct old_slot* outputs;
  uint32_t input_count, output_count;
};
struct old_completion {
  size_t size;
  int32_t status;
  uint32_t failed_op;
  int64_t submit_ns, start_ns, finish_ns, predicted_finish_ns;
};

#define SAME_FIELD(now, old, field)                                   \
  _Static_assert(offsetof(now, field) == offsetof(struct old, field), \
                 #now "." #field " moved: old programs break")
#define NOT_SMALLER(now, old) \
  _Static_assert(sizeof(now) >= sizeof(struct old), #now " lost fields: old programs break")

NOT_SMALLER(slice_session_options_t, old_session_options);
SAME_FIELD(slice_session_options_t, old_session_options, size);
SAME_FIELD(slice_session_options_t, old_session_options, socket_path);
SAME_FIELD(slice_session_options_t, old_session_options, name);
SAME_FIELD(slice_session_options_t, old_session_options, service_class);
SAME_FIELD(slice_session_options_t, old_session_options, reserved);
SAME_FIELD(slice_session_options_t, old_session_options, weight);
SAME_FIELD(slice_session_options_t, old_session_options, arena_bytes);
SAME_FIELD(slice_session_options_t, old_session_options, home_device);
NOT_SMALLER(slice_session_limits_t, old_session_limits);
SAME_FIELD(slice_session_limits_t, old_session_limits, service_class);
SAME_FIELD(slice_session_limits_t, old_session_limits, queue_slots);
SAME_FIELD(slice_session_limits_t, old_session_limits, memory_bytes_max);
SAME_FIELD(slice_session_limits_t, old_session_limits, arena_bytes);
SAME_FIELD(slice_session_limits_t, old_session_limits, offline_op_ns_max);
SAME_FIELD(slice_session_limits_t, old_session_limits, deadline_ns_min);
SAME_FIELD(slice_session_limits_t, old_session_limits, daemon_epoch);
SAME_FIELD(slice_session_limits_t, old_session_limits, device_count);
SAME_FIELD(slice_session_limits_t, old_session_limits, session_number);
NOT_SMALLER(slice_tensor_spec_t, old_tensor_spec);
SAME_FIELD(slice_tensor_spec_t, old_tensor_spec, name);
SAME_FIELD(slice_tensor_spec_t, old_tensor_spec, dtype);
SAME_FIELD(slice_tensor_spec_t, old_tensor_spec, dim_count);
SAME_FIELD(slice_tensor_spec_t, old_tensor_spec, sizes);
SAME_FIELD(slice_tensor_spec_t, old_tensor_spec, strides);
SAME_FIELD(slice_tensor_spec_t, old_tensor_spec, offset);
NOT_SMALLER(slice_sequence_options_t, old_sequence_options);
SAME_FIELD(slice_sequence_options_t, old_sequence_options, service_class);
SAME_FIELD(slice_sequence_options_t, old_sequence_options, priority);
SAME_FIELD(slice_sequence_options_t, old_sequence_options, deadline_ns);
_Static_assert(sizeof(slice_slot_t) == sizeof(struct old_slot),
               "slice_slot_t is used in arrays: it can never grow");
SAME_FIELD(slice_slot_t, old_slot, bytes);
NOT_SMALLER(slice_submit_args_t, old_submit_args);
SAME_FIELD(slice_submit_args_t, old_submit_args, binding);
SAME_FIELD(slice_submit_args_t, old_submit_args, sequence);
SAME_FIELD(slice_submit_args_t, old_submit_args, deadline_ns);
SAME_FIELD(slice_submit_args_t, old_submit_args, priority);
SAME_FIELD(slice_submit_args_t, old_submit_args, symbol_count);
SAME_FIELD(slice_submit_args_t, old_submit_args, symbols);
SAME_FIELD(slice_submit_args_t, old_submit_args, inputs);
SAME_FIELD(slice_submit_args_t, old_submit_args, outputs);
SAME_FIELD(slice_submit_args_t, old_submit_args, input_count);
SAME_FIELD(slice_submit_args_t, old_submit_args, output_count);
NOT_SMALLER(slice_completion_t, old_completion);
SAME_FIELD(slice_completion_t, old_completion, status);
SAME_FIELD(slice_completion_t, old_completion, failed_op);
SAME_FIELD(slice_completion_t, old_completion, submit_ns);
SAME_FIELD(slice_completion_t, old_completion, start_ns);
SAME_FIELD(slice_completion_t, old_completion, finish_ns);
SAME_FIELD(slice_completion_t, old_completion, predicted_finish_ns);
_Static_assert(sizeof(slice_status_t) == 4, "slice_status_t is passed as int");
_Static_assert(sizeof(slice_tensor_t) == 8 && sizeof(slice_ticket_t) == 8, "handles are 64 bits");
_Static_assert(SLICE_ERR_INVALID == 1 && SLICE_ERR_WOULD_BLOCK == 9 &&
                   SLICE_ERR_DAEMON_LOST == 15 && SLICE_ERR_INTERNAL == 19 &&
                   SLICE_ERR_TIMEOUT == 20,
               "status numbers are ABI");
_Static_assert(SLICE_DTYPE_FLOAT32 == 1 && SLICE_DTYPE_INT64 == 5 && SLICE_DTYPE_BOOL == 10 &&
                   SLICE_DTYPE_FLOAT8_E5M2 == 14,
               "dtype numbers are ABI");

int main(void) {
  slice_session_options_t options = {.size = sizeof options,
                                     .socket_path = "/nonexistent/sliced.sock"};
  slice_session_t* session = NULL;
  const slice_status_t status = slice_session_open(&options, &session);
  if (status != SLICE_ERR_DAEMON_LOST || session != NULL) {
    fprintf(stderr, "expected SLICE_ERR_DAEMON_LOST, got %s\n", slice_status_name(status));
    return 1;
  }
  if (strstr(slice_last_error(), "/nonexistent/sliced.sock") == NULL) {
    fprintf(stderr, "the text does not name the socket: %s\n", slice_last_error());
    return 1;
  }
  if (slice_abi_version() >> 16 != SLICE_ABI_MAJOR) {
    fprintf(stderr, "library of ABI %u, header of %d\n", (unsigned)(slice_abi_version() >> 16),
            SLICE_ABI_MAJOR);
    return 1;
  }
  return 0;
}
