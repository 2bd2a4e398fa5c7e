/* SliceScheduler C ABI: what a tenant links (libslice.so) to run graphs through the daemon
 * `sliced`.
 *
 * Plain C11, opaque handles, no global state besides a thread-local error text.
 * Threads: a session and everything made from it may be used by several threads at once, unless
 * said otherwise. Fork: not usable in a child after fork(); calls return SLICE_ERR_INVALID there.
 * Open a session in the child. Times are nanoseconds of CLOCK_MONOTONIC. Sizes are bytes, shapes
 * are elements, row-major. Option structs begin with `size` (set it to sizeof the struct) and are
 * zero-extended: new fields are added at the end and zero means "default". Reserved fields must be
 * zero. Errors: every function that can fail returns slice_status_t; on failure outputs are not
 * written and slice_last_error() of the same thread holds a text that says what, where, the
 * numbers, and what to do.
 */
#ifndef SLICE_SLICE_H_
#define SLICE_SLICE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SLICE_ABI_MAJOR 1
#define SLICE_ABI_MINOR 0

#if defined(__GNUC__)
#define SLICE_API __attribute__((visibility("default")))
#else
#define SLICE_API
#endif

/* ---- status
 * ----------------------------------------------------------------------------------------------------
 */

typedef enum slice_status {
  SLICE_OK = 0,
  SLICE_ERR_INVALID = 1, /* malformed argument, wrong kind of handle */
  SLICE_ERR_GRAPH = 2,   /* template refused: cyclic, dangling, wrong types */
  SLICE_ERR_OP_NOT_ALLOWED =
      3,                  /* template uses operators outside the allow-list (text names them) */
  SLICE_ERR_OVERFLOW = 4, /* a size does not fit in 63 bits, or a symbol is out of its range */
  SLICE_ERR_BOUNDS = 5, /* a slot outside the arena or of the wrong size, or an output that overlaps
                           one still in flight */
  SLICE_ERR_STALE = 6,  /* handle of something that is gone */
  SLICE_ERR_QUOTA = 7,  /* over the tenant's memory quota (text says who holds what) */
  SLICE_ERR_NEVER_FITS = 8,  /* the request can never fit in the memory there is */
  SLICE_ERR_WOULD_BLOCK = 9, /* queue full: wait for a completion and try again */
  SLICE_ERR_DEADLINE = 10,   /* dropped because its deadline passed (drop_late) */
  SLICE_ERR_CANCELLED = 11,
  SLICE_ERR_OP_FAILED = 12,     /* an operator failed; only this request is affected */
  SLICE_ERR_EXECUTOR_LOST = 13, /* the executor died and could not be brought back in time; retry */
  SLICE_ERR_STATE_LOST =
      14, /* a managed tensor this request needs is lost; reset it and start the sequence again */
  SLICE_ERR_DAEMON_LOST =
      15, /* no connection to sliced (text says the socket's path and how to start it) */
  SLICE_ERR_VERSION = 16,   /* client and daemon speak different versions */
  SLICE_ERR_PROTOCOL = 17,  /* the other side broke the protocol; the session is closed */
  SLICE_ERR_NO_MEMORY = 18, /* the system or the arena is out of memory */
  SLICE_ERR_INTERNAL = 19,  /* a bug of ours; please report it with the daemon's log */
  SLICE_ERR_TIMEOUT = 20 /* not finished within the time given (slice_wait), or the daemon did not
                            answer in time (text says its pid and what to try) */
} slice_status_t;

/* "SLICE_ERR_BOUNDS"; never NULL. */
SLICE_API const char* slice_status_name(slice_status_t status);
/* 1 when the same call may succeed later without a change of its arguments. */
SLICE_API int slice_status_is_retryable(slice_status_t status);
/* Text of the calling thread's last failure; valid until its next call into this library. Never
 * NULL. */
SLICE_API const char* slice_last_error(void);
/* (major << 16) | minor of the library that is loaded. */
SLICE_API uint32_t slice_abi_version(void);

/* ---- sessions
 * --------------------------------------------------------------------------------------------------
 */

typedef struct slice_session slice_session_t;

#define SLICE_CLASS_DEFAULT 0u
#define SLICE_CLASS_ONLINE 1u  /* latency-critical */
#define SLICE_CLASS_OFFLINE 2u /* fills idle slices */

typedef struct slice_session_options {
  size_t size;
  const char* socket_path; /* NULL: $SLICE_SOCKET, else /run/slicescheduler/sliced.sock */
  const char* name;        /* for people, e.g. "chat-frontend"; NULL: the program's name */
  uint32_t
      service_class; /* SLICE_CLASS_*; may lower what the daemon's config grants, never raise it */
  uint32_t reserved;
  double weight;           /* share among tenants of one class; 0 = configured */
  uint64_t arena_bytes;    /* inputs and results; 0 = 64 MiB */
  const char* home_device; /* e.g. "cpu0"; NULL: daemon chooses */
} slice_session_options_t;

/* Connects. Ownership: *session is the caller's, free with slice_session_close. Blocks: until the
 * daemon answers, at most 10 s. Errors: DAEMON_LOST, VERSION, QUOTA (session or connection limit),
 * TIMEOUT, PROTOCOL. `options` may be NULL.
 *
 * Later calls that ask the daemon (on tensors, graphs and bindings) wait for its answer, at most
 * 300 s, since registering a large graph or replicating a model takes its time; at most 5 s when
 * the daemon is stopped by a signal. Then they return TIMEOUT, and the daemon may still do what was
 * asked. */
SLICE_API slice_status_t slice_session_open(const slice_session_options_t* options,
                                            slice_session_t** session);
/* Cancels what is in flight and frees everything of the session. No other thread may be using it.
 * NULL is fine. */
SLICE_API void slice_session_close(slice_session_t* session);
/* A descriptor that is readable when completions wait or the session is lost (poll, epoll).
 * Level-triggered: readable until every finished ticket is taken; on readable call
 * slice_wait(session, ticket, 0, ...) for the tickets of interest. May be readable for nothing
 * once: slice_wait(session, 0, 0, NULL) then returns TIMEOUT and clears it. Owned by the session;
 * do not read or close it. -1 on failure. */
SLICE_API int slice_session_fd(const slice_session_t* session);

typedef struct slice_limits {
  size_t size;
  uint32_t service_class;    /* SLICE_CLASS_* in force */
  uint32_t queue_slots;      /* submits in flight before WOULD_BLOCK */
  uint64_t memory_bytes_max; /* quota */
  uint64_t arena_bytes;
  uint64_t
      offline_op_ns_max; /* an offline op longer than this waits for a long slice: chunk prompts */
  uint64_t deadline_ns_min; /* tighter deadlines are raised to this */
  uint64_t daemon_epoch;    /* differs after each daemon start */
  uint32_t device_count;    /* devices this session may use */
  uint32_t session_number;  /* as slicectl shows it */
} slice_session_limits_t;
SLICE_API slice_status_t slice_session_limits(const slice_session_t* session,
                                              slice_session_limits_t* limits);

/* ---- arena: inputs and results
 * --------------------------------------------------------------------------------- */

/* Reserves `bytes` (rounded up to 64) of the session's shared arena. *pointer is writable memory
 * shared with the daemon, *offset its place. A slot must not be written or freed while a submit
 * that names it is in flight. Errors: NO_MEMORY (arena full). */
SLICE_API slice_status_t slice_arena_alloc(slice_session_t* session, uint64_t bytes,
                                           uint64_t* offset, void** pointer);
SLICE_API slice_status_t slice_arena_free(slice_session_t* session, uint64_t offset);

/* ---- tensors
 * ---------------------------------------------------------------------------------------------------
 */

typedef uint64_t slice_tensor_t; /* handle with generation; 0 is never valid */

typedef enum slice_dtype { /* the numbers of proto.DType */
                           SLICE_DTYPE_FLOAT32 = 1,
                           SLICE_DTYPE_FLOAT64 = 2,
                           SLICE_DTYPE_FLOAT16 = 3,
                           SLICE_DTYPE_BFLOAT16 = 4,
                           SLICE_DTYPE_INT64 = 5,
                           SLICE_DTYPE_INT32 = 6,
                           SLICE_DTYPE_INT16 = 7,
                           SLICE_DTYPE_INT8 = 8,
                           SLICE_DTYPE_UINT8 = 9,
                           SLICE_DTYPE_BOOL = 10,
                           SLICE_DTYPE_COMPLEX64 = 11,
                           SLICE_DTYPE_COMPLEX128 = 12,
                           SLICE_DTYPE_FLOAT8_E4M3FN = 13,
                           SLICE_DTYPE_FLOAT8_E5M2 = 14
} slice_dtype_t;

#define SLICE_DIMS_MAX 8
typedef struct slice_tensor_spec {
  size_t size;
  const char* name;   /* for people; may be NULL */
  uint32_t dtype;     /* slice_dtype_t */
  uint32_t dim_count; /* 0..SLICE_DIMS_MAX */
  int64_t sizes[SLICE_DIMS_MAX];
  int64_t strides[SLICE_DIMS_MAX]; /* elements; all zero: dense */
  uint64_t offset;                 /* imports: bytes into the memfd, multiple of 64 */
} slice_tensor_spec_t;

#define SLICE_TENSOR_CONSTANT 1u /* never written while registered; the daemon may replicate it */
#define SLICE_TENSOR_MUTABLE 2u  /* written by graphs; stays where it is */

/* Registers tensors that lie in one memfd of the caller's, sealed F_SEAL_SHRINK. Zero-copy,
 * resident on the session's home device. Writes `count` handles. Ownership: the memfd stays the
 * caller's to close; the pages live until release. Errors: INVALID, BOUNDS, OVERFLOW, QUOTA. */
SLICE_API slice_status_t slice_tensor_import(slice_session_t* session, int memfd, uint32_t kind,
                                             const slice_tensor_spec_t* specs, size_t count,
                                             slice_tensor_t* handles);
/* Makes replicas of constants on the named devices now (all devices of the session when
 * `device_count` is 0). Blocks until they are there. Errors: QUOTA, NO_MEMORY, STALE. */
SLICE_API slice_status_t slice_tensor_replicate(slice_session_t* session,
                                                const slice_tensor_t* handles, size_t count,
                                                const char* const* devices, size_t device_count);
/* Allocates managed tensors (zeroed): the daemon owns and may move them; graphs and the commands
 * below change them. `views` (may be NULL) receives read-only addresses of the home copies, valid
 * until release; they show a tensor only while it is at home: use slice_tensor_read to be sure.
 * NULL where the daemon shows no view. Errors: QUOTA, NEVER_FITS, OVERFLOW. */
SLICE_API slice_status_t slice_tensor_alloc(slice_session_t* session,
                                            const slice_tensor_spec_t* specs, size_t count,
                                            slice_tensor_t* handles, const void** views);
/* Commands and runs that were submitted before, and bindings, keep them until they end. */
SLICE_API slice_status_t slice_tensor_release(slice_session_t* session,
                                              const slice_tensor_t* handles, size_t count);

/* Commands on managed tensors: ordered with the graphs that use them, in submit order. Each returns
 * a ticket for slice_wait; pass NULL to wait inside the call. A reset makes a lost tensor usable
 * again. */
typedef uint64_t slice_ticket_t;
SLICE_API slice_status_t slice_tensor_reset(slice_session_t* session, const slice_tensor_t* handles,
                                            size_t count, slice_ticket_t* ticket);
/* `element` holds one element's bits in its low bytes, little endian. */
SLICE_API slice_status_t slice_tensor_fill(slice_session_t* session, const slice_tensor_t* handles,
                                           size_t count, uint64_t element, slice_ticket_t* ticket);
/* Zeroes everything at or beyond `length` along `dimension`. */
SLICE_API slice_status_t slice_tensor_crop(slice_session_t* session, const slice_tensor_t* handles,
                                           size_t count, int32_t dimension, uint64_t length,
                                           slice_ticket_t* ticket);
/* One whole dense tensor from or to an arena slot of exactly its bytes. */
SLICE_API slice_status_t slice_tensor_write(slice_session_t* session, slice_tensor_t handle,
                                            uint64_t arena_offset, uint64_t bytes,
                                            slice_ticket_t* ticket);
SLICE_API slice_status_t slice_tensor_read(slice_session_t* session, slice_tensor_t handle,
                                           uint64_t arena_offset, uint64_t bytes,
                                           slice_ticket_t* ticket);

/* ---- graphs and bindings
 * --------------------------------------------------------------------------------------- */

typedef uint64_t slice_graph_t;
typedef uint64_t slice_binding_t;

/* Registers a serialized slice.proto.GraphTemplate; the same content again is free. Errors: GRAPH,
 * OP_NOT_ALLOWED, OVERFLOW, QUOTA. Blocks until the daemon and its executor have checked it. */
SLICE_API slice_status_t slice_graph_register(slice_session_t* session, const void* bytes,
                                              size_t size, slice_graph_t* graph);
SLICE_API slice_status_t slice_graph_unregister(slice_session_t* session, slice_graph_t graph);
/* Binds one tensor per static input, in template order. A submit then carries only symbols, dynamic
 * inputs, results. */
SLICE_API slice_status_t slice_binding_create(slice_session_t* session, slice_graph_t graph,
                                              const slice_tensor_t* tensors, size_t count,
                                              slice_binding_t* binding);
/* What was submitted before still runs. */
SLICE_API slice_status_t slice_binding_destroy(slice_session_t* session, slice_binding_t binding);

/* ---- running
 * ---------------------------------------------------------------------------------------------------
 */

typedef uint64_t slice_sequence_t;
typedef struct slice_sequence_options {
  size_t size;
  uint32_t service_class; /* SLICE_CLASS_*; may lower, never raise */
  int32_t priority;       /* inside the class; higher first */
  uint64_t deadline_ns;   /* absolute; 0 = none */
} slice_sequence_options_t;
/* One request as its user sees it: a prefill and its decode steps share a deadline. Never blocks.
 * Errors: WOULD_BLOCK. `options` may be NULL. */
SLICE_API slice_status_t slice_sequence_open(slice_session_t* session,
                                             const slice_sequence_options_t* options,
                                             slice_sequence_t* sequence);
SLICE_API slice_status_t slice_sequence_close(slice_session_t* session, slice_sequence_t sequence);

typedef struct slice_slot {
  uint64_t offset, bytes;
} slice_slot_t; /* in the arena; offset a multiple of 64 */
typedef struct slice_submit_args {
  size_t size;
  slice_binding_t binding;
  slice_sequence_t sequence; /* 0: a sequence of one */
  uint64_t deadline_ns;      /* 0: the sequence's */
  int32_t priority;
  uint32_t symbol_count;
  const int64_t* symbols; /* values of the template's symbols, in order */
  const slice_slot_t*
      inputs; /* one per dynamic input, template order, exactly the bytes its shape needs */
  const slice_slot_t* outputs; /* one per value output, template order */
  uint32_t input_count;
  uint32_t output_count;
} slice_submit_args_t;
/* Queues one run. Never blocks. Errors: WOULD_BLOCK (queue full), INVALID, STALE, DAEMON_LOST. What
 * the daemon finds wrong (BOUNDS, NEVER_FITS, ...) comes with the completion. */
SLICE_API slice_status_t slice_submit(slice_session_t* session, const slice_submit_args_t* args,
                                      slice_ticket_t* ticket);

typedef struct slice_completion {
  size_t size;
  slice_status_t status;
  uint32_t failed_op;                     /* group index, UINT32_MAX = none */
  int64_t submit_ns, start_ns, finish_ns; /* measured by the daemon and the executor */
  int64_t predicted_finish_ns;            /* as predicted at submit; 0 = none */
} slice_completion_t;
/* Waits for one ticket; each ticket is consumed by the wait that returns its completion. timeout_ns
 * < 0: for ever; 0: poll. Ticket 0: waits until any ticket is finished and returns OK without
 * consuming it. Returns the request's own status (and fills *completion, which may be NULL) or
 * TIMEOUT, DAEMON_LOST, or SLICE_ERR_CANCELLED with errno EINTR when a signal arrived: the ticket
 * stays valid then. */
SLICE_API slice_status_t slice_wait(slice_session_t* session, slice_ticket_t ticket,
                                    int64_t timeout_ns, slice_completion_t* completion);
/* Asks to drop a request. Its completion still comes, with CANCELLED unless it finished first. */
SLICE_API slice_status_t slice_cancel(slice_session_t* session, slice_ticket_t ticket);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* SLICE_SLICE_H_ */
