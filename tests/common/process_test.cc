#include "common/process.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

namespace slice {
namespace {

TEST(Happy_Process, StoppedAndContinuedIsSeen) {
  const pid_t child = ::fork();
  if (child == 0) {
    for (;;) ::pause();
  }
  EXPECT_FALSE(IsStopped(child));
  int status = 0;
  ::kill(child, SIGSTOP);
  ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
  EXPECT_TRUE(IsStopped(child));
  ::kill(child, SIGCONT);
  ASSERT_EQ(::waitpid(child, &status, WCONTINUED), child);
  EXPECT_FALSE(IsStopped(child));
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, &status, 0), child);
}

TEST(Edge_Process, UnknownIsNotStopped) {
  EXPECT_FALSE(IsStopped(0));
  EXPECT_FALSE(IsStopped(-1));
  EXPECT_FALSE(IsStopped(1 << 30));
}

}  // namespace
}  // namespace slice
