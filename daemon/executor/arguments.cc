#include "daemon/executor/arguments.h"

#include <ATen/ATen.h>
#include <ATen/core/jit_type.h>

#include "daemon/executor/tensors.h"

namespace slice::executor {
namespace {

using Kind = proto::Argument;

const char* KindName(Kind::KindCase kind) {
  switch (kind) {
    case Kind::kNone:
      return "None";
    case Kind::kValue:
      return "a tensor";
    case Kind::kValues:
      return "a list of tensors";
    case Kind::kInteger:
      return "an integer";
    case Kind::kFloating:
      return "a float";
    case Kind::kBoolean:
      return "a bool";
    case Kind::kIntegers:
      return "a list of integers";
    case Kind::kFloatings:
      return "a list of floats";
    case Kind::kBooleans:
      return "a list of bools";
    case Kind::kText:
      return "a string";
    case Kind::kDtype:
      return "a dtype";
    case Kind::kDevice:
      return "a device";
    case Kind::kLayout:
      return "a layout";
    case Kind::kMemoryFormat:
      return "a memory format";
    case Kind::kComplex:
      return "a complex number";
    default:
      return "nothing";
  }
}

at::Tensor WrappedNumber(const c10::Scalar& scalar) {
  at::Tensor tensor = at::scalar_tensor(scalar, scalar.isFloatingPoint() ? at::kDouble
                                                : scalar.isBoolean()     ? at::kBool
                                                : scalar.isComplex()     ? at::kComplexDouble
                                                                         : at::kLong);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);  // type promotion as for a Python number
  return tensor;
}

class Matcher {
 public:
  Matcher(const c10::Argument& schema, const proto::Argument& arg, const ArgumentContext& context,
          c10::IValue* constant, ArgPatch* patch, bool* patched)
      : schema_(schema),
        arg_(arg),
        context_(context),
        constant_(constant),
        patch_(patch),
        patched_(patched) {}

  Status Run() {
    c10::TypePtr type = schema_.real_type();
    if (const auto optional = type->cast<c10::OptionalType>()) {
      if (arg_.kind_case() == Kind::kNone) return Set(c10::IValue());
      type = optional->getElementType();
    }
    switch (type->kind()) {
      case c10::TypeKind::TensorType:
        return Tensor();
      case c10::TypeKind::ListType:
        return List(*type->cast<c10::ListType>()->getElementType());
      case c10::TypeKind::IntType:
      case c10::TypeKind::SymIntType:
        return Integer();
      case c10::TypeKind::NumberType:
        return Number();
      case c10::TypeKind::FloatType:
        if (arg_.kind_case() == Kind::kFloating) return Set(arg_.floating());
        if (arg_.kind_case() == Kind::kInteger &&
            arg_.integer().node_case() == proto::Expr::kConstant) {
          return Set(static_cast<double>(arg_.integer().constant()));
        }
        return Mismatch("float");
      case c10::TypeKind::BoolType:
      case c10::TypeKind::SymBoolType:
        return arg_.kind_case() == Kind::kBoolean ? Set(arg_.boolean()) : Mismatch("bool");
      case c10::TypeKind::StringType:
        return arg_.kind_case() == Kind::kText ? Set(arg_.text()) : Mismatch("string");
      case c10::TypeKind::ScalarTypeType:
        return DType();
      case c10::TypeKind::LayoutType:
        if (arg_.kind_case() == Kind::kLayout && arg_.layout() == "strided") {
          return Set(static_cast<int64_t>(c10::Layout::Strided));
        }
        return Mismatch("layout \"strided\"");
      case c10::TypeKind::MemoryFormatType:
        return MemoryFormat();
      case c10::TypeKind::DeviceObjType:
        if (arg_.kind_case() == Kind::kDevice && arg_.device() == proto::CPU) {
          return Set(c10::IValue(c10::Device(c10::kCPU)));
        }
        return Mismatch("device CPU");
      default:
        return Error(StatusCode::kGraph,
                     "argument '%s': operators with arguments of type %s cannot be used",
                     schema_.name().c_str(), type->str().c_str());
    }
  }

 private:
  Status Mismatch(const char* wanted) const {
    return Error(StatusCode::kGraph, "argument '%s' is %s, the schema wants %s (%s)",
                 schema_.name().c_str(), KindName(arg_.kind_case()), wanted,
                 schema_.type()->str().c_str());
  }
  Status Set(c10::IValue value) {
    *constant_ = std::move(value);
    return Status::Ok();
  }
  Status Patch(ArgPatch::Kind kind) {
    patch_->kind = kind;
    *patched_ = true;
    return Status::Ok();
  }

  Status Tensor() {
    switch (arg_.kind_case()) {
      case Kind::kValue:
        patch_->locals.push_back(context_.local_of(arg_.value()));
        return Patch(ArgPatch::Kind::kTensor);
      case Kind::kFloating:
        return Set(WrappedNumber(arg_.floating()));
      case Kind::kBoolean:
        return Set(WrappedNumber(arg_.boolean()));
      case Kind::kComplex:
        return Set(
            WrappedNumber(c10::complex<double>(arg_.complex().real(), arg_.complex().imag())));
      case Kind::kInteger: {
        SLICE_ASSIGN_OR_RETURN(const IntSource source, context_.integer(arg_.integer()));
        if (source.slot < 0) return Set(WrappedNumber(source.constant));
        patch_->integers.push_back(source);
        return Patch(ArgPatch::Kind::kWrappedInteger);
      }
      default:
        return Mismatch("a tensor");
    }
  }

  Status Integer() {
    if (arg_.kind_case() != Kind::kInteger) return Mismatch("an integer");
    SLICE_ASSIGN_OR_RETURN(const IntSource source, context_.integer(arg_.integer()));
    if (source.slot < 0) return Set(source.constant);
    patch_->integers.push_back(source);
    return Patch(ArgPatch::Kind::kInteger);
  }

  Status Number() {
    switch (arg_.kind_case()) {
      case Kind::kInteger:
        return Integer();
      case Kind::kFloating:
        return Set(arg_.floating());
      case Kind::kBoolean:
        return Set(arg_.boolean());
      case Kind::kComplex:
        return Set(c10::IValue(c10::complex<double>(arg_.complex().real(), arg_.complex().imag())));
      default:
        return Mismatch("a number");
    }
  }

  Status DType() {
    if (arg_.kind_case() != Kind::kDtype) return Mismatch("a dtype");
    const auto type = ToScalarType(arg_.dtype());
    if (!type.has_value()) return Mismatch("a known dtype");
    return Set(static_cast<int64_t>(*type));
  }

  Status MemoryFormat() {
    if (arg_.kind_case() != Kind::kMemoryFormat) return Mismatch("a memory format");
    const std::string& name = arg_.memory_format();
    c10::MemoryFormat format = c10::MemoryFormat::Contiguous;
    if (name == "preserve_format") {
      format = c10::MemoryFormat::Preserve;
    } else if (name == "channels_last") {
      format = c10::MemoryFormat::ChannelsLast;
    } else if (name != "contiguous_format") {
      return Mismatch("contiguous_format, preserve_format or channels_last");
    }
    return Set(static_cast<int64_t>(format));
  }

  Status List(const c10::Type& element) {
    switch (element.kind()) {
      case c10::TypeKind::TensorType:
        return TensorList(false);
      case c10::TypeKind::OptionalType:
        return TensorList(true);
      case c10::TypeKind::IntType:
      case c10::TypeKind::SymIntType:
        return IntegerList();
      case c10::TypeKind::FloatType: {
        if (arg_.kind_case() != Kind::kFloatings) return Mismatch("a list of floats");
        c10::List<double> list;
        for (const double value : arg_.floatings().value()) list.push_back(value);
        return Set(list);
      }
      case c10::TypeKind::BoolType: {
        if (arg_.kind_case() != Kind::kBooleans) return Mismatch("a list of bools");
        c10::List<bool> list;
        for (const bool value : arg_.booleans().value()) list.push_back(value);
        return Set(list);
      }
      default:
        return Mismatch("a list that templates can carry");
    }
  }

  Status TensorList(bool optional) {
    if (arg_.kind_case() != Kind::kValues) return Mismatch("a list of tensors");
    for (const int64_t value : arg_.values().value()) {
      if (value < 0 && !optional) return Mismatch("a list of tensors without None");
      patch_->locals.push_back(value < 0 ? kNoLocal
                                         : context_.local_of(static_cast<uint32_t>(value)));
    }
    return Patch(optional ? ArgPatch::Kind::kOptionalTensorList : ArgPatch::Kind::kTensorList);
  }

  Status IntegerList() {
    bool symbolic = false;
    const auto add = [&](const proto::Expr& expr) -> Status {
      SLICE_ASSIGN_OR_RETURN(const IntSource source, context_.integer(expr));
      symbolic |= source.slot >= 0;
      patch_->integers.push_back(source);
      return Status::Ok();
    };
    if (arg_.kind_case() == Kind::kInteger &&
        schema_.N().has_value()) {  // int[1] written as an int
      for (int i = 0; i < *schema_.N(); ++i) SLICE_RETURN_IF_ERROR(add(arg_.integer()));
    } else if (arg_.kind_case() == Kind::kIntegers) {
      for (const proto::Expr& expr : arg_.integers().value()) SLICE_RETURN_IF_ERROR(add(expr));
    } else {
      return Mismatch("a list of integers");
    }
    if (symbolic) return Patch(ArgPatch::Kind::kIntegerList);
    c10::List<int64_t> list;
    for (const IntSource& source : patch_->integers) list.push_back(source.constant);
    return Set(list);
  }

  const c10::Argument& schema_;
  const proto::Argument& arg_;
  const ArgumentContext& context_;
  c10::IValue* constant_;
  ArgPatch* patch_;
  bool* patched_;
};

}  // namespace

Status MatchArgument(const c10::Argument& schema, const proto::Argument& arg,
                     const ArgumentContext& context, c10::IValue* constant, ArgPatch* patch,
                     bool* patched) {
  return Matcher(schema, arg, context, constant, patch, patched).Run();
}

}  // namespace slice::executor
