// The functions of slice.h: argument checks, exceptions to codes, the thread's last error.
// Everything else: Session.
#include <cerrno>
#include <exception>
#include <new>
#include <string>

#include "libclient/options.h"
#include "libclient/session.h"
#include "slice/slice.h"

struct slice_session {
  std::unique_ptr<slice::client::Session> session;
};

namespace {

using slice::Error;
using slice::Status;
using slice::StatusCode;
using slice::client::CheckStructSize;
using slice::client::ReadOptions;
using slice::client::Session;

thread_local std::string last_error;
thread_local const char* last_error_text =
    "";  // last_error, or a literal when there was no memory for it

slice_status_t Fail(const char* function, StatusCode code, const char* text) noexcept {
  try {
    last_error.assign(function).append(": ").append(text);
    last_error_text = last_error.c_str();
  } catch (...) {
    last_error_text = "out of memory while describing an error";
  }
  return static_cast<slice_status_t>(code);
}

// One place where exceptions (bad_alloc, protobuf) become codes.
template <typename Body>
slice_status_t Guarded(const char* function, Body&& body) noexcept {
  try {
    const Status status = body();
    return status.ok() ? SLICE_OK : Fail(function, status.code(), status.text().c_str());
  } catch (const std::bad_alloc&) {
    return Fail(function, StatusCode::kNoMemory, "the process is out of memory");
  } catch (const std::exception& e) {
    return Fail(function, StatusCode::kInternal, e.what());
  } catch (...) {
    return Fail(function, StatusCode::kInternal, "unknown exception");
  }
}

// As above, for functions of a session.
template <typename Body>
slice_status_t WithSession(const char* function, const slice_session_t* session,
                           Body&& body) noexcept {
  return Guarded(function, [&]() -> Status {
    if (session == nullptr) return Error(StatusCode::kInvalid, "session is NULL");
    SLICE_RETURN_IF_ERROR(session->session->CheckNotForked());
    return body(*session->session);
  });
}

Status NullArgument(const char* name) { return Error(StatusCode::kInvalid, "%s is NULL", name); }

template <typename T>
Status CheckArray(const char* name, const T* pointer, size_t count, size_t count_min = 1) {
  if (count < count_min)
    return Error(StatusCode::kInvalid, "%s: count is %zu, at least %zu needed", name, count,
                 count_min);
  if (pointer == nullptr && count != 0)
    return Error(StatusCode::kInvalid, "%s is NULL and count is %zu", name, count);
  return Status::Ok();
}

// Reset, fill, crop, write, read. A signal while waiting is told apart by errno.
slice_status_t RunCommand(const char* function, slice_session_t* session,
                          const Session::TensorCommand& command, const slice_tensor_t* handles,
                          size_t count, slice_ticket_t* ticket) noexcept {
  bool interrupted = false;
  const slice_status_t status = WithSession(function, session, [&](Session& s) -> Status {
    SLICE_RETURN_IF_ERROR(CheckArray("handles", handles, count));
    return s.CommandTensors(command, {handles, count}, ticket, &interrupted);
  });
  if (status == SLICE_ERR_CANCELLED) errno = interrupted ? EINTR : 0;
  return status;
}

}  // namespace

extern "C" {

// ---- status
// ---------------------------------------------------------------------------------------------------------

const char* slice_status_name(slice_status_t status) {
  switch (status) {
    case SLICE_OK:
      return "SLICE_OK";
    case SLICE_ERR_INVALID:
      return "SLICE_ERR_INVALID";
    case SLICE_ERR_GRAPH:
      return "SLICE_ERR_GRAPH";
    case SLICE_ERR_OP_NOT_ALLOWED:
      return "SLICE_ERR_OP_NOT_ALLOWED";
    case SLICE_ERR_OVERFLOW:
      return "SLICE_ERR_OVERFLOW";
    case SLICE_ERR_BOUNDS:
      return "SLICE_ERR_BOUNDS";
    case SLICE_ERR_STALE:
      return "SLICE_ERR_STALE";
    case SLICE_ERR_QUOTA:
      return "SLICE_ERR_QUOTA";
    case SLICE_ERR_NEVER_FITS:
      return "SLICE_ERR_NEVER_FITS";
    case SLICE_ERR_WOULD_BLOCK:
      return "SLICE_ERR_WOULD_BLOCK";
    case SLICE_ERR_DEADLINE:
      return "SLICE_ERR_DEADLINE";
    case SLICE_ERR_CANCELLED:
      return "SLICE_ERR_CANCELLED";
    case SLICE_ERR_OP_FAILED:
      return "SLICE_ERR_OP_FAILED";
    case SLICE_ERR_EXECUTOR_LOST:
      return "SLICE_ERR_EXECUTOR_LOST";
    case SLICE_ERR_STATE_LOST:
      return "SLICE_ERR_STATE_LOST";
    case SLICE_ERR_DAEMON_LOST:
      return "SLICE_ERR_DAEMON_LOST";
    case SLICE_ERR_VERSION:
      return "SLICE_ERR_VERSION";
    case SLICE_ERR_PROTOCOL:
      return "SLICE_ERR_PROTOCOL";
    case SLICE_ERR_NO_MEMORY:
      return "SLICE_ERR_NO_MEMORY";
    case SLICE_ERR_INTERNAL:
      return "SLICE_ERR_INTERNAL";
    case SLICE_ERR_TIMEOUT:
      return "SLICE_ERR_TIMEOUT";
  }
  return "SLICE_ERR_UNKNOWN";
}

int slice_status_is_retryable(slice_status_t status) {
  switch (status) {
    case SLICE_ERR_QUOTA:  // others' or own requests may free memory
    case SLICE_ERR_WOULD_BLOCK:
    case SLICE_ERR_EXECUTOR_LOST:
    case SLICE_ERR_DAEMON_LOST:  // in a new session
    case SLICE_ERR_NO_MEMORY:
    case SLICE_ERR_TIMEOUT:
      return 1;
    default:
      return 0;
  }
}

const char* slice_last_error(void) { return last_error_text; }

uint32_t slice_abi_version(void) { return (uint32_t{SLICE_ABI_MAJOR} << 16) | SLICE_ABI_MINOR; }

// ---- sessions
// -------------------------------------------------------------------------------------------------------

slice_status_t slice_session_open(const slice_session_options_t* options,
                                  slice_session_t** session) {
  return Guarded(__func__, [&]() -> Status {
    if (session == nullptr) return NullArgument("session");
    slice_session_options_t complete{};
    if (options != nullptr)
      SLICE_RETURN_IF_ERROR(ReadOptions("slice_session_options_t", options, &complete));
    auto handle = std::make_unique<slice_session>();
    SLICE_ASSIGN_OR_RETURN(handle->session, Session::Open(complete));
    *session = handle.release();
    return Status::Ok();
  });
}

void slice_session_close(slice_session_t* session) { delete session; }

int slice_session_fd(const slice_session_t* session) {
  int fd = -1;
  const slice_status_t status = WithSession(__func__, session, [&](Session& s) -> Status {
    fd = s.EventLoopFd();
    return fd >= 0
               ? Status::Ok()
               : slice::ErrnoError(StatusCode::kNoMemory, errno, "cannot make an epoll descriptor");
  });
  return status == SLICE_OK ? fd : -1;
}

slice_status_t slice_session_limits(const slice_session_t* session,
                                    slice_session_limits_t* limits) {
  return WithSession(__func__, session, [&](Session& s) -> Status {
    if (limits == nullptr) return NullArgument("limits");
    SLICE_RETURN_IF_ERROR(CheckStructSize("slice_session_limits_t", limits->size, sizeof *limits));
    SLICE_RETURN_IF_ERROR(s.CheckNotLost());
    slice::client::WriteOutput(s.limits(), limits);
    return Status::Ok();
  });
}

// ---- arena
// ----------------------------------------------------------------------------------------------------------

slice_status_t slice_arena_alloc(slice_session_t* session, uint64_t bytes, uint64_t* offset,
                                 void** pointer) {
  return WithSession(__func__, session, [&](Session& s) -> Status {
    if (offset == nullptr) return NullArgument("offset");
    return s.ArenaAlloc(bytes, offset, pointer);
  });
}

slice_status_t slice_arena_free(slice_session_t* session, uint64_t offset) {
  return WithSession(__func__, session, [&](Session& s) { return s.ArenaFree(offset); });
}

// ---- tensors
// --------------------------------------------------------------------------------------------------------

slice_status_t slice_tensor_import(slice_session_t* session, int memfd, uint32_t kind,
                                   const slice_tensor_spec_t* specs, size_t count,
                                   slice_tensor_t* handles) {
  return WithSession(__func__, session, [&](Session& s) -> Status {
    SLICE_RETURN_IF_ERROR(CheckArray("handles", handles, count));
    SLICE_ASSIGN_OR_RETURN(const auto checked, slice::client::ReadTensorSpecs(specs, count));
    return s.ImportTensors(memfd, kind, checked, handles);
  });
}

slice_status_t slice_tensor_replicate(slice_session_t* session, const slice_tensor_t* handles,
                                      size_t count, const char* const* devices,
                                      size_t device_count) {
  return WithSession(__func__, session, [&](Session& s) -> Status {
    SLICE_RETURN_IF_ERROR(CheckArray("handles", handles, count));
    SLICE_RETURN_IF_ERROR(CheckArray("devices", devices, device_count, 0));
    return s.ReplicateTensors({handles, count}, {devices, device_count});
  });
}

slice_status_t slice_tensor_alloc(slice_session_t* session, const slice_tensor_spec_t* specs,
                                  size_t count, slice_tensor_t* handles, const void** views) {
  return WithSession(__func__, session, [&](Session& s) -> Status {
    SLICE_RETURN_IF_ERROR(CheckArray("handles", handles, count));
    SLICE_ASSIGN_OR_RETURN(const auto checked, slice::client::ReadTensorSpecs(specs, count));
    return s.AllocTensors(checked, handles, views);
  });
}

slice_status_t slice_tensor_release(slice_session_t* session, const slice_tensor_t* handles,
                                    size_t count) {
  return WithSession(__func__, session, [&](Session& s) -> Status {
    SLICE_RETURN_IF_ERROR(CheckArray("handles", handles, count));
    return s.ReleaseTensors({handles, count});
  });
}

slice_status_t slice_tensor_reset(slice_session_t* session, const slice_tensor_t* handles,
                                  size_t count, slice_ticket_t* ticket) {
  return RunCommand(__func__, session, {.kind = slice::wire::kTensorReset}, handles, count, ticket);
}

slice_status_t slice_tensor_fill(slice_session_t* session, const slice_tensor_t* handles,
                                 size_t count, uint64_t element, slice_ticket_t* ticket) {
  return RunCommand(__func__, session, {.kind = slice::wire::kTensorFill, .parameter = element},
                    handles, count, ticket);
}

slice_status_t slice_tensor_crop(slice_session_t* session, const slice_tensor_t* handles,
                                 size_t count, int32_t dimension, uint64_t length,
                                 slice_ticket_t* ticket) {
  return RunCommand(__func__, session,
                    {.kind = slice::wire::kTensorCrop, .parameter = length, .dimension = dimension},
                    handles, count, ticket);
}

slice_status_t slice_tensor_write(slice_session_t* session, slice_tensor_t handle,
                                  uint64_t arena_offset, uint64_t bytes, slice_ticket_t* ticket) {
  return RunCommand(
      __func__, session,
      {.kind = slice::wire::kTensorWrite, .arena_offset = arena_offset, .arena_bytes = bytes},
      &handle, 1, ticket);
}

slice_status_t slice_tensor_read(slice_session_t* session, slice_tensor_t handle,
                                 uint64_t arena_offset, uint64_t bytes, slice_ticket_t* ticket) {
  return RunCommand(
      __func__, session,
      {.kind = slice::wire::kTensorRead, .arena_offset = arena_offset, .arena_bytes = bytes},
      &handle, 1, ticket);
}

// ---- graphs and bindings
// --------------------------------------------------------------------------------------------

slice_status_t slice_graph_register(slice_session_t* session, const void* bytes, size_t size,
                                    slice_graph_t* graph) {
  return WithSession(__func__, session, [&](Session& s) -> Status {
    if (graph == nullptr) return NullArgument("graph");
    SLICE_RETURN_IF_ERROR(CheckArray("bytes", static_cast<const std::byte*>(bytes), size));
    return s.RegisterGraph({static_cast<const std::byte*>(bytes), size}, graph);
  });
}

slice_status_t slice_graph_unregister(slice_session_t* session, slice_graph_t graph) {
  return WithSession(__func__, session, [&](Session& s) { return s.UnregisterGraph(graph); });
}

slice_status_t slice_binding_create(slice_session_t* session, slice_graph_t graph,
                                    const slice_tensor_t* tensors, size_t count,
                                    slice_binding_t* binding) {
  return WithSession(__func__, session, [&](Session& s) -> Status {
    if (binding == nullptr) return NullArgument("binding");
    SLICE_RETURN_IF_ERROR(CheckArray("tensors", tensors, count, 0));
    return s.CreateBinding(graph, {tensors, count}, binding);
  });
}

slice_status_t slice_binding_destroy(slice_session_t* session, slice_binding_t binding) {
  return WithSession(__func__, session, [&](Session& s) { return s.DestroyBinding(binding); });
}

// ---- running
// --------------------------------------------------------------------------------------------------------

slice_status_t slice_sequence_open(slice_session_t* session,
                                   const slice_sequence_options_t* options,
                                   slice_sequence_t* sequence) {
  return WithSession(__func__, session, [&](Session& s) -> Status {
    if (sequence == nullptr) return NullArgument("sequence");
    slice_sequence_options_t complete{};
    if (options != nullptr)
      SLICE_RETURN_IF_ERROR(ReadOptions("slice_sequence_options_t", options, &complete));
    return s.OpenSequence(complete, sequence);
  });
}

slice_status_t slice_sequence_close(slice_session_t* session, slice_sequence_t sequence) {
  return WithSession(__func__, session, [&](Session& s) { return s.CloseSequence(sequence); });
}

slice_status_t slice_submit(slice_session_t* session, const slice_submit_args_t* args,
                            slice_ticket_t* ticket) {
  return WithSession(__func__, session, [&](Session& s) -> Status {
    if (args == nullptr) return NullArgument("args");
    if (ticket == nullptr) return NullArgument("ticket");
    slice_submit_args_t complete{};
    SLICE_RETURN_IF_ERROR(ReadOptions("slice_submit_args_t", args, &complete));
    return s.Submit(complete, ticket);
  });
}

slice_status_t slice_wait(slice_session_t* session, slice_ticket_t ticket, int64_t timeout_ns,
                          slice_completion_t* completion) {
  bool interrupted = false;
  const slice_status_t status = WithSession(__func__, session, [&](Session& s) -> Status {
    if (completion != nullptr) {
      SLICE_RETURN_IF_ERROR(
          CheckStructSize("slice_completion_t", completion->size, sizeof *completion));
    }
    return s.Wait(ticket, timeout_ns, completion, &interrupted);
  });
  if (status == SLICE_ERR_CANCELLED) errno = interrupted ? EINTR : 0;
  return status;
}

slice_status_t slice_cancel(slice_session_t* session, slice_ticket_t ticket) {
  return WithSession(__func__, session, [&](Session& s) { return s.Cancel(ticket); });
}

}  // extern "C"
