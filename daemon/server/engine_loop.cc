#include "daemon/server/engine_loop.h"

#include <sys/epoll.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <nlohmann/json.hpp>

#include "common/clock.h"
#include "slice/proto/control.pb.h"

namespace slice::server {
namespace {

constexpr int kReportsPerTurn = 1024;
constexpr uint32_t kSlotsPerTurn = 32;            // per tenant: one cannot starve the others
constexpr DurationNs kRetryDelay = kMillisecond;  // a full command ring: nobody signals its end

template <typename Item>
std::vector<std::string> Names(const std::vector<Item>& items) {
  std::vector<std::string> names;
  for (const Item& item : items) names.push_back(item.name);
  return names;
}

}  // namespace

EngineLoop::EngineLoop(const engine::Config& config, Options options, Events events)
    : options_(options),
      events_(std::move(events)),
      devices_(config.devices),
      timeline_(Names(config.devices), Names(config.domains), options.timeline_events_max),
      wake_devices_(config.devices.size()),
      wake_latency_(options.cpu_wake_latency_us),
      executor_watch_(config.devices.size(), options.executor_limits),
      stuck_logged_(config.devices.size()) {}

Result<std::unique_ptr<EngineLoop>> EngineLoop::Create(const engine::Config& config,
                                                       std::span<std::byte> gmg_memory,
                                                       const EngineFactory& factory,
                                                       Options options, Events events) {
  std::unique_ptr<EngineLoop> loop(new EngineLoop(config, options, std::move(events)));
  SLICE_RETURN_IF_ERROR(loop->OpenDescriptors());
  SLICE_ASSIGN_OR_RETURN(loop->engine_, factory(config, gmg_memory, loop.get()));
  return loop;
}

Status EngineLoop::OpenDescriptors() {
  SLICE_RETURN_IF_ERROR(mailbox_.Open());
  epoll_ = Fd(::epoll_create1(EPOLL_CLOEXEC));
  timer_ = Fd(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  if (!epoll_.valid() || !timer_.valid())
    return ErrnoError(StatusCode::kNoMemory, errno, "epoll or timerfd");
  for (const int fd : {mailbox_.fd().get(), timer_.get()}) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLET;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
      return ErrnoError(StatusCode::kNoMemory, errno, "epoll_ctl");
    }
  }
  return Status::Ok();
}

EngineLoop::~EngineLoop() { Stop(); }

void EngineLoop::Start() {
  running_ = true;
  thread_ = std::thread([this] { Main(); });
}

void EngineLoop::Stop() {
  if (!running_) return;
  stopping_.store(true);
  mailbox_.Post([] {});
  thread_.join();
  running_ = false;
  mailbox_.Drain();
}

void EngineLoop::Call(const std::function<void()>& task) {
  if (!running_) {
    now_ = MonotonicNow();
    task();
    return;
  }
  std::mutex mutex;
  std::condition_variable done_changed;
  bool done = false;
  mailbox_.Post([&] {
    task();
    std::lock_guard lock(mutex);
    done = true;
    done_changed.notify_one();
  });
  std::unique_lock lock(mutex);
  done_changed.wait(lock, [&] { return done; });
}

void EngineLoop::Main() {
  while (!stopping_.load()) {
    if (!Turn()) Sleep();
  }
}

// True when something was done, or more is waiting.
bool EngineLoop::Turn() {
  turns_.fetch_add(1, std::memory_order_relaxed);
  now_ = MonotonicNow();
  bool worked = mailbox_.Drain(/*clear=*/false);
  worked |= DrainReports();
  for (auto& [id, tenant] : tenants_) worked |= DrainSubmissions(tenant.get(), kSlotsPerTurn);
  const TimeNs wake = engine_->NextWake();
  now_ = MonotonicNow();
  if (worked || wake <= now_) {
    engine_->Run(now_);
    const TimeNs end = MonotonicNow();
    round_samples_[round_count_++ % round_samples_.size()] = end - now_;
    now_ = end;
    worked = true;
  }
  FlushCommands();
  for (const uint32_t id : to_publish_) {
    const auto found = tenants_.find(id);
    if (found == tenants_.end()) continue;
    Tenant* tenant = found->second.get();
    if (tenant->ring->PublishCompleted()) tenant->throttle.delay = 0;  // likely to be read soon
  }
  to_publish_.clear();
  RunWatches();
  WatchExecutor();
  wake_latency_.Update(now_);
  return worked;
}

void EngineLoop::Sleep() {
  for (auto& [id, tenant] : tenants_) tenant->ring->SetSleeping(true);
  bool ready = reports_ != nullptr && !reports_->PrepareSleep();
  for (auto& [id, tenant] : tenants_) {
    ready = ready || (!tenant->broken && tenant->ring->HasSubmissions());
  }
  if (!ready) {
    ArmTimer(NextWake());
    std::array<epoll_event, 16> events{};
    // Edge-triggered and never read: see tenant_ring.h. The mailbox is looked at in every turn.
    ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), -1);
  }
  if (reports_ != nullptr) reports_->EndSleep();
  for (auto& [id, tenant] : tenants_) tenant->ring->SetSleeping(false);
}

TimeNs EngineLoop::NextWake() const {
  TimeNs wake = engine_->NextWake();
  const TimeNs now = MonotonicNow();
  if (!overflow_.empty()) wake = std::min(wake, now + kRetryDelay);
  for (const auto& [id, tenant] : tenants_) {
    if (!tenant->broken) wake = std::min(wake, tenant->throttle.look_at);
  }
  wake = std::min(wake, wake_latency_.NextLook());
  return executor_ == nullptr ? wake : std::min(wake, executor_watch_.NextLook(now));
}

void EngineLoop::ArmTimer(TimeNs when) {
  if (when == armed_ && when == kNever) return;
  armed_ = when;
  itimerspec spec{};  // zero disarms
  if (when != kNever) {
    const TimeNs at = std::max<TimeNs>(when, 1);
    spec.it_value.tv_sec = at / kSecond;
    spec.it_value.tv_nsec = at % kSecond;
  }
  ::timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &spec, nullptr);
}

void EngineLoop::WhenTrue(std::function<bool()> condition, std::function<void()> then) {
  watches_.push_back({std::move(condition), std::move(then)});
}

void EngineLoop::RunWatches() {
  for (size_t i = 0; i < watches_.size();) {
    if (!watches_[i].condition()) {
      ++i;
      continue;
    }
    const std::function<void()> then = std::move(watches_[i].then);
    watches_.erase(watches_.begin() + static_cast<std::ptrdiff_t>(i));
    then();
  }
}

// ---- executor
// -------------------------------------------------------------------------------------------------------

void EngineLoop::AttachExecutor(std::unique_ptr<ExecutorRings> rings, uint64_t generation) {
  executor_generation_ = generation;
  executor_ = std::move(rings);
  commands_ =
      std::make_unique<RecordRing>(executor_->commands.data(), wire::kExecutorRingCapacityBytes);
  reports_ =
      std::make_unique<RecordRing>(executor_->reports.data(), wire::kExecutorRingCapacityBytes);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  SLICE_CHECK(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, executor_->engine_event.get(), &event) == 0,
              "epoll: executor");
  reports_broken_ = hang_reported_ = false;
  ForgetExecutorState();
  engine_->ExecutorReady(now_);
}

std::vector<engine::TenantUser> EngineLoop::DetachExecutor() {
  if (executor_ == nullptr) return {};
  while (DrainReports()) {
  }
  std::vector<engine::TenantUser> launched = engine_->LaunchedTenants();
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, executor_->engine_event.get(), nullptr);
  commands_.reset();
  reports_.reset();
  executor_.reset();
  overflow_.clear();
  ForgetExecutorState();
  engine_->ExecutorLost(now_);
  return launched;
}

void EngineLoop::ExecutorGivenUp() { engine_->ExecutorGivenUp(now_); }

bool EngineLoop::DrainReports() {
  bool any = false;
  for (int i = 0; i < kReportsPerTurn && reports_ != nullptr && !reports_broken_; ++i) {
    Result<bool> popped = reports_->Pop(&record_);
    Status status = popped.status();
    if (popped.ok()) {
      if (!*popped) break;
      any = true;
      NoteReport(record_.type, record_.payload);
      status = engine_->HandleReport(record_.type, record_.payload, now_);
    }
    if (!status.ok()) {
      reports_broken_ = true;
      events_.executor_fault(executor_generation_, status);
      break;
    }
  }
  return any;
}

void EngineLoop::NoteReport(uint32_t type, std::span<const std::byte> payload) {
  executor_watch_.Reported();
  if (type == wire::kStarted && payload.size() == sizeof(wire::Started)) {
    wire::Started started{};
    std::memcpy(&started, payload.data(), sizeof started);
    executor_watch_.Started(started.device, now_);
  } else if (type == wire::kFinished && payload.size() == sizeof(wire::Finished)) {
    wire::Finished finished{};
    std::memcpy(&finished, payload.data(), sizeof finished);
    executor_watch_.Finished(finished.device);
  } else if (type == wire::kFailed) {
    executor_watch_.Failed();
  }
}

void EngineLoop::ForgetExecutorState() {
  executor_watch_.Reset();
  woken_ahead_ = kNoDevice;
  silence_logged_ = false;
  std::fill(stuck_logged_.begin(), stuck_logged_.end(), false);
}

// Says once when the executor, or a device of it, stops responding and when it goes on; reports a
// hang.
void EngineLoop::WatchExecutor() {
  if (commands_ == nullptr) return;
  executor_watch_.Look(commands_->taken(), commands_->pushed(), engine_->OverrunDevices(now_),
                       now_);
  const TimeNs silent_since = executor_watch_.silent_since();
  if ((silent_since != 0) != silence_logged_) {
    silence_logged_ = silent_since != 0;
    executor_log_.Warn(silence_logged_
                           ? "the executor does not respond: commands wait since " +
                                 std::to_string((now_ - silent_since) / kMillisecond) + " ms"
                           : "the executor responds again");
  }
  for (size_t device = 0; device < devices_.size(); ++device) {
    const TimeNs stuck_since = executor_watch_.stuck_since(device);
    if ((stuck_since != 0) == stuck_logged_[device]) continue;
    stuck_logged_[device] = stuck_since != 0;
    const std::string name = "device '" + devices_[device].name + "'";
    executor_log_.Warn(stuck_since != 0
                           ? name + ": an op has been running for " +
                                 std::to_string((now_ - stuck_since) / kMillisecond) +
                                 " ms, far longer than predicted; it gets no new work"
                           : name + ": the op that ran far longer than predicted is over");
  }
  if (hang_reported_) return;
  const std::optional<std::string> hang = executor_watch_.Hang(now_);
  if (!hang.has_value()) return;
  hang_reported_ = true;
  events_.executor_fault(executor_generation_, Status(StatusCode::kTimeout, *hang));
}

void EngineLoop::ToExecutor(uint32_t type, std::span<const std::byte> payload, DeviceIndex wake) {
  if (commands_ == nullptr) return;  // the engine will be told again by ExecutorReady
  if (wake < wake_devices_.size()) {
    wake_devices_[wake] = true;
  } else {
    wake_any_ = true;
  }
  if (overflow_.empty() && commands_->Push(type, payload)) return;
  overflow_.push_back({type, {payload.begin(), payload.end()}});
}

void EngineLoop::FlushCommands() {
  if (commands_ == nullptr) return;
  while (!overflow_.empty() && commands_->Push(overflow_.front().type, overflow_.front().payload)) {
    overflow_.pop_front();
    wake_any_ = true;
  }
  bool pushed = wake_any_;
  for (const bool wake : wake_devices_) pushed = pushed || wake;
  if (!pushed) return;
  // Whoever of the executor's threads wakes takes all commands and wakes the devices concerned.
  // None sleeps: one is about to look. The one that WakeAhead woke is on its way, unless an op that
  // we did not know of holds it: it answers for its own commands, not for those of others.
  const bool sleeps = commands_->ConsumerSleeps();
  if (sleeps) woken_ahead_ = kNoDevice;
  if (sleeps || woken_ahead_ != kNoDevice) {
    bool signalled = woken_ahead_ != kNoDevice;
    for (DeviceIndex device = 0; device < wake_devices_.size(); ++device) {
      if (!wake_devices_[device] || device == woken_ahead_) continue;
      SignalEventFd(executor_->device_events[device]);
      signalled = true;
    }
    if (!signalled) SignalEventFd(executor_->device_events.front());
  }
  wake_any_ = false;
  std::fill(wake_devices_.begin(), wake_devices_.end(), false);
}

// ---- sink
// -----------------------------------------------------------------------------------------------------------

void EngineLoop::Complete(TenantId id, const wire::CompletionSlot& completion,
                          const std::string& text) {
  const auto found = tenants_.find(id.value);
  if (found == tenants_.end()) return;  // ended meanwhile
  Tenant* tenant = found->second.get();
  if (!tenant->live.contains(completion.cookie)) {
    SLICE_LOG_ERROR("server",
                    "the engine completed request %llu of session %u that is not in flight",
                    static_cast<unsigned long long>(completion.cookie), id.value);
    return;
  }
  ReleaseLive(tenant, completion.cookie);
  wire::CompletionSlot slot = completion;
  slot.text_token = text.empty() ? 0 : KeepText(tenant, text);
  tenant->ring->Complete(slot);
  to_publish_.insert(id.value);
}

void EngineLoop::Trace(const engine::TraceEvent& event) { timeline_.Add(event); }

std::string EngineLoop::StatusJson() {
  nlohmann::json status = nlohmann::json::parse(engine_->StatusJson(now_), nullptr, false);
  if (!status.is_object()) status = nlohmann::json::object();
  const size_t count = std::min<size_t>(round_count_, round_samples_.size());
  std::vector<DurationNs> samples(round_samples_.begin(),
                                  round_samples_.begin() + static_cast<std::ptrdiff_t>(count));
  std::sort(samples.begin(), samples.end());
  const auto quantile = [&](size_t percent) {
    return count == 0 ? 0 : samples[(count - 1) * percent / 100];
  };
  status["policy"] = engine_->policy_name();
  status["round_ns_p50"] = quantile(50);
  status["round_ns_p99"] = quantile(99);
  status["engine_turns"] = round_count_;
  status["sessions"] = tenants_.size();
  // "executor" is up, given up or restarting, as far as the engine knows.
  const TimeNs silent_since = executor_watch_.silent_since();
  status["executor_up"] = executor_ != nullptr && silent_since == 0;
  if (silent_since != 0) {
    status["executor"] = "not responding";
    status["executor_silent_ns"] = now_ - silent_since;
  }
  for (size_t device = 0; device < devices_.size(); ++device) {
    const TimeNs stuck_since = executor_watch_.stuck_since(device);
    if (stuck_since != 0) status["overrun"][devices_[device].name + "_ns"] = now_ - stuck_since;
  }
  status["timeline_on"] = timeline_.on();
  return status.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string EngineLoop::DevicesJson(bool executor_stopped) {
  nlohmann::json answer = nlohmann::json::parse(engine_->DevicesJson(now_), nullptr, false);
  if (!answer.is_object()) answer = nlohmann::json::object();
  const bool silent = executor_stopped || executor_watch_.silent_since() != 0;
  for (nlohmann::json& device : answer["devices"]) {
    device["state"] = executor_ == nullptr             ? "no executor"
                      : silent                         ? "not responding"
                      : device.value("overrun", false) ? "overrun"
                      : device.contains("running")     ? "running"
                                                       : "idle";
  }
  return answer.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace slice::server
