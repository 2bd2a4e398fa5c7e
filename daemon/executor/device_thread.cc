// The thread of one device: drain commands, choose the best ready op, run it, report.
#include <c10/core/InferenceMode.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>

#include "common/clock.h"
#include "common/log.h"
#include "daemon/executor/executor.h"
#include "daemon/executor/zygote.h"

namespace slice::executor {
namespace {

// A report that an op started wakes the engine only when there is time to act on it before it
// finishes.
constexpr DurationNs kStartedWakeNs = 200 * kMicrosecond;
constexpr DurationNs kSpinNs = 50 * kMicrosecond;
// The engine wakes us while it still places an online request (EngineLoop::WakeAhead).
constexpr DurationNs kWokenAheadNs = 60 * kMicrosecond;
constexpr DurationNs kReportRetryNs = kMillisecond;

void PinTo(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(cpu), &set);
  if (::pthread_setaffinity_np(::pthread_self(), sizeof set, &set) != 0) {
    SLICE_LOG_WARN("executor", "cannot pin a device to CPU %d; it runs unpinned", cpu);
  }
}

void Pause() {
#if defined(__x86_64__)
  for (int i = 0; i < 64; ++i) __builtin_ia32_pause();
#else
  ::sched_yield();
#endif
}

}  // namespace

void Executor::RunDevice(Device* device) {
  ::pthread_setname_np(::pthread_self(), ("dev-" + device->config.name()).substr(0, 15).c_str());
  if (device->config.cpu() >= 0) PinTo(device->config.cpu());
  PrepareThread();
  const c10::InferenceMode inference;
  Frame frame;
  LaunchedOp launched;
  TimeNs spin_until_ns = 0;
  TimeNs commands_until_ns = 0;
  for (;;) {
    std::unique_lock lock(mutex_);
    DrainLocked();
    TimeNs wake_ns = kNever;
    const bool chosen = ChooseLocked(device, &launched, &frame, &wake_ns);
    if (!chosen && executing_ == 0 && MonotonicNow() < commands_until_ns) {
      WakeLocked(static_cast<int>(device->index));
      lock.unlock();
      ::sched_yield();  // whoever else needs this CPU goes first
      continue;         // looks again: nobody has to signal
    }
    const bool changed = LeaveLocked(static_cast<int>(device->index));
    if (chosen) {
      ++executing_;
      lock.unlock();
      Execute(device, &launched, &frame);
      spin_until_ns = may_spin_ ? MonotonicNow() + kSpinNs : 0;
      continue;
    }
    if (changed) continue;
    if (!device->queue.empty() &&
        MonotonicNow() < spin_until_ns) {  // issued work that will be ready soon
      lock.unlock();
      Pause();
      continue;
    }
    device->sleeping = true;
    lock.unlock();
    commands_until_ns = SleepDevice(device, wake_ns) ? MonotonicNow() + kWokenAheadNs : 0;
    lock.lock();
    device->sleeping = false;
    ring_->EndSleep();
  }
}

// True when somebody signalled.
bool Executor::SleepDevice(Device* device, TimeNs wake_ns) {
  if (reports_->Flush()) wake_ns = std::min(wake_ns, MonotonicNow() + kReportRetryNs);
  timespec timeout{};
  if (wake_ns != kNever) {
    const DurationNs left = std::max<DurationNs>(wake_ns - MonotonicNow(), 0);
    timeout = {static_cast<time_t>(left / kSecond), static_cast<long>(left % kSecond)};
  }
  epoll_event event;
  if (::epoll_pwait2(device->poll.get(), &event, 1, wake_ns == kNever ? nullptr : &timeout,
                     nullptr) > 0) {
    ClearEventFd(device->event);
    return true;
  }
  return false;
}

// Takes the best op out of the queue and fills the frame. False: nothing to run before *wake_ns.
bool Executor::ChooseLocked(Device* device, LaunchedOp* launched, Frame* frame, TimeNs* wake_ns) {
  for (;;) {
    const TimeNs now = MonotonicNow();
    LaunchQueue::Decision decision = device->queue.Next(now, device->behind_online);
    for (const QueuedOp& op : decision.out_of_window) Recalled(op.key, 1);
    *wake_ns = decision.wake_ns;
    if (!decision.launch.has_value()) return false;
    launched->op = *decision.launch;
    launched->instance = ShareInstance(launched->op.key.instance, launched->op.key.attempt);
    if (launched->instance == nullptr) continue;  // cannot be: ending removes its ops
    Instance* instance = launched->instance.get();
    const uint32_t op = launched->op.key.op;
    launched->start_ns = MonotonicNow();
    // In the ring before the op touches anything: an op that never reported Started has written
    // nothing.
    const wire::Started started{instance->id(),     instance->attempt(), op,
                                launched->start_ns, device->index,       0};
    if (!reports_->TryPush(wire::kStarted, started, launched->op.duration_ns >= kStartedWakeNs)) {
      device->queue.Add(launched->op);
      *wake_ns = std::min(*wake_ns, now + kReportRetryNs);
      return false;
    }
    const Status gathered =
        instance->Gather(op, device->config.domain(), frame, &launched->missing);
    if (!gathered.ok()) {
      frame->locals.clear();
      instance->ops[op] = OpState::kNone;
      FailInstance(instance, op, gathered, false);
      continue;
    }
    instance->ops[op] = OpState::kLaunched;
    ++instance->running;
    return true;
  }
}

void Executor::Execute(Device* device, LaunchedOp* launched, Frame* frame) {
  const std::shared_ptr<Instance> instance = std::move(launched->instance);
  const uint32_t op = launched->op.key.op;
  const uint32_t domain = device->config.domain();
  const Program& program = *instance->binding().program();
  const DurationNs cpu_before = ThreadCpuNow();
  backend_->BeginOp({device->config.ordinal(), domain, instance->tenant()});
  RunTrace trace;
  Status status = instance->CopyInputs(&launched->missing, frame);
  if (status.ok())
    status = RunGroup(program, program.groups()[op], instance->integers(), frame, &trace);
  if (status.ok()) status = instance->StoreResults(op, *frame);
  OpTiming timing;
  const Status ended = backend_->EndOp(&timing);
  if (status.ok()) status = ended;
  const TimeNs end_ns = MonotonicNow();
  const wire::Finished finished{instance->id(),
                                instance->attempt(),
                                op,
                                launched->start_ns,
                                end_ns,
                                ThreadCpuNow() - cpu_before,
                                timing.peak_bytes,
                                device->index,
                                0};

  const std::lock_guard lock(mutex_);
  --executing_;
  device->behind_online = launched->op.service_class == ServiceClass::kOnline;
  --instance->running;
  if (status.ok()) {
    instance->Complete(op, domain, &launched->missing, frame);
    frame->locals.clear();
    launched->missing.clear();
    reports_->Push(wire::kFinished, finished);
    if (!instance->ending) RefreshReady(instance.get());
  } else {
    frame->locals.clear();
    launched->missing.clear();
    instance->ops[op] = OpState::kNone;
    FailInstance(instance.get(), op, status, trace.began_write);
  }
  EndIfIdle(instance);
}

}  // namespace slice::executor
