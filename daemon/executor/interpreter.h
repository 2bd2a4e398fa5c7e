// Runs one prepared group on the calling thread. Stateless but for the caller's frame; one frame
// per thread.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/status.h"
#include "daemon/executor/program.h"

namespace slice::executor {

struct Frame {
  std::vector<c10::IValue>
      locals;  // externals are put here before the run; exports are taken from here after it
  std::vector<c10::IValue> stack;  // of boxed calls
};

struct RunTrace {
  bool began_write = false;  // a static input may be (half) written
};

// Sizes the frame for `group` and clears it.
void PrepareFrame(const PreparedGroup& group, Frame* frame);

// `integers`: BoundProgram::integers of the instance. The frame is left as is on failure: clear
// it. Errors: NO_MEMORY (cap or pool), OP_FAILED (which node, what torch says).
Status RunGroup(const Program& program, const PreparedGroup& group, const int64_t* integers,
                Frame* frame, RunTrace* trace);

// One hoisted view of `source`. Errors as above.
Result<at::Tensor> RunHoisted(const Program& program, const HoistedView& view,
                              const at::Tensor& source);

}  // namespace slice::executor
