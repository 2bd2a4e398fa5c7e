#include "common/process.h"

#include <fstream>
#include <iterator>
#include <string>

namespace slice {

bool IsStopped(pid_t pid) {
  if (pid <= 0) return false;
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string stat{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  // "PID (NAME) STATE ...": the name may hold anything, parentheses too.
  const size_t name_end = stat.rfind(") ");
  if (name_end == std::string::npos || name_end + 2 >= stat.size()) return false;
  const char state = stat[name_end + 2];
  return state == 'T' || state == 't';
}

}  // namespace slice
