// The operators that a template may call (include/slice/allowed_operators.txt, compiled in).
#pragma once

#include <string_view>
#include <unordered_set>

namespace slice::executor {
// "aten::add.Tensor"; the default overload has no suffix. Threads: any.
const std::unordered_set<std::string_view>& AllowedOperators();
}  // namespace slice::executor
